"""GGUF targets: tiny files written with the gguf package, and the default model's own file against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import KIND, write_gguf
from support.paged_rows import Paged
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_target
from support.transformers_model import keep_float64, reference_model
from torch import Tensor

from overlap_spec.config import EngineConfig, ModelFiles, cache_directory
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import resolve_model
from overlap_spec.hub.smollm2 import ALIAS, MEMBER
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.loading.loader import load_target, read_target_config
from overlap_spec.models.targets.decoder import DecoderWeights

Q8, Q4 = KIND.Q8_0, KIND.Q4_1
WIDE = {"hidden": 256, "head_dim": 64}  # rows of whole blocks of 256
TYPES: dict[str, dict[str, Any]] = {
    "groups": {"q_proj": KIND.Q4_0, "k_proj": KIND.Q4_0, "v_proj": KIND.Q5_0, "gate_proj": KIND.Q5_1, "down_proj": Q8},
    "bits 2, 3": {"q_proj": KIND.Q2_K, "v_proj": KIND.Q3_K, "gate_proj": KIND.Q2_K, "lm_head": KIND.Q6_K},
    "bits 4 to 6": {"q_proj": KIND.Q4_K, "v_proj": KIND.Q6_K, "down_proj": KIND.Q5_K, "embed_tokens": KIND.Q6_K},
    "floats": {"q_proj": KIND.F16, "up_proj": KIND.BF16, "embed_tokens": Q8},
}
FAMILIES = {
    name: TINY_FAMILIES[name] | changes
    for name, changes in (
        ("llama", {}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {}),
        ("gemma 3", {"query_pre_attn_scalar": 64, "sliding_window_pattern": 6, "layers": 6}),
    )
}


def files(path: Path) -> ModelFiles:
    return resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True))


def logits(weights: DecoderWeights, tokens: list[int]) -> Tensor:
    paged = Paged(num_requests=1)
    cache = KVCache.allocate(weights.kv_shape, paged.num_pages, paged.page_size, torch.float64, CPU)
    model = weights.attach(cache, 512)
    return model.logits(model.forward(torch.tensor(tokens), paged.rows([len(tokens)])).hidden).compute()


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_is_the_model_that_was_written(tied: bool, tmp_path: Path) -> None:
    checkpoint = tiny_target(1, context=1.0, tie_word_embeddings=tied)
    types = {"q_proj": Q8, "k_proj": Q4, "gate_proj": Q4, "down_proj": Q8, "embed_tokens": Q8}
    kept = write_gguf(tmp_path / "tiny.gguf", checkpoint, types)
    given = files(tmp_path / "tiny.gguf")
    assert (given.eos_token_ids, given.context_length, given.vocab_size) == ((2,), 512, 128)
    loaded = load_target(given, torch.float64, CPU)
    expected = load_tiny_target(kept)
    tokens = [1, 30, 60, 90, 3, 4, 5]
    torch.testing.assert_close(logits(loaded, tokens), logits(expected, tokens), atol=1e-12, rtol=0)


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize(
    ("family", "types"),
    [*(("llama", name) for name in TYPES), ("qwen2", "bits 2, 3"), ("qwen3", "bits 4 to 6"), ("gemma 3", "groups")],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_types_and_architectures_give_the_logits_of_transformers(
    family: str, types: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers gets the dequantised weights and the config that the file was written from."""
    keep_float64(monkeypatch)
    checkpoint = tiny_target(5, context=1.0, **(WIDE | FAMILIES[family]))
    kept = write_gguf(tmp_path / "tiny.gguf", checkpoint, TYPES[types])
    loaded = load_target(files(tmp_path / "tiny.gguf"), torch.float64, CPU)
    tokens = [1, 30, 60, 90, 3, 4, 5, 77, 101, 9]
    with torch.no_grad():
        expected = reference_model(kept, torch.float64)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits(loaded, tokens), expected.double(), atol=1e-4, rtol=0)


def test_other_metadata_of_the_families(tmp_path: Path) -> None:
    gemma = tiny_target(2, **FAMILIES["gemma 3"])
    write_gguf(tmp_path / "tiny.gguf", gemma, {}, gemma3__rope__scaling__type="linear", tokenizer__ggml__eot_token_id=5)
    config = files(tmp_path / "tiny.gguf").config
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert config["rope_parameters"]["full_attention"]["rope_type"] == "linear", "of layers without a window alone"
    assert config["rope_parameters"]["sliding_attention"] == {"rope_theta": 1e4, "rope_type": "default"}
    assert files(tmp_path / "tiny.gguf").eos_token_ids == (2, 5), "a turn ends with a token of its own"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"architecture": "phi3"},
        "general.architecture: found 'phi3', expected one of 'llama', 'qwen2', 'qwen3'",
    ),
    ("llama", {"llama__expert_count": 8}, "llama.expert_count: mixtures of experts are not supported"),
    ("llama", {"split__count": 2}, r"split.count: found 2, expected one file"),
    ("llama", {"llama__rope__dimension_count": 4}, "llama.rope.dimension_count: found 4, expected 16"),
    ("llama", {"llama__rope__scaling__type": "longrope"}, "rope type 'longrope' is not supported"),
    ("qwen2", {"qwen2__attention__sliding_window": 64}, "qwen2.attention.sliding_window: found 64.0, expected 0.0"),
    ("gemma 3", {"gemma3__attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping: found 50.0, expected 0.0"),
]


@pytest.mark.parametrize(("family", "metadata", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_its_key(
    family: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_target(3, **FAMILIES[family]), {}, **metadata)
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: .*{message}"):
        read_target_config(files(tmp_path / "tiny.gguf"))


def test_rope_scaling_of_metadata(tmp_path: Path) -> None:
    scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    write_gguf(tmp_path / "tiny.gguf", tiny_target(2), {}, **scaling)
    assert files(tmp_path / "tiny.gguf").config["rope_parameters"] == {
        "rope_theta": 10000.0,
        "rope_type": "linear",
        "factor": 4.0,
    }


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGML" + bytes(64))
    with pytest.raises(CheckpointError, match=r"bad\.gguf: not a readable GGUF file"):
        files(tmp_path / "bad.gguf")


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    config = tiny_target(4)
    names = dict(config.tensors) | {"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 64)}
    write_gguf(tmp_path / "tiny.gguf", TinyCheckpoint(config.config, names), {})
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: tensor layers\.0\.mlp\.up_proj\.weight: found shape"):
        load_target(files(tmp_path / "tiny.gguf"), torch.float64, CPU)


DEFAULT_GGUF = Path(cache_directory()) / ALIAS / Path(MEMBER).name


@pytest.mark.full  # transformers takes half a minute to read it
@pytest.mark.skipif(
    not DEFAULT_GGUF.is_file(),
    reason=f"reads the default model, and there is no {DEFAULT_GGUF}: the first `overlap-spec serve` downloads it",
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_default_model_speaks_as_in_transformers() -> None:
    """Greedy tokens of the real file, transformers reading the same GGUF with its own code."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    given = resolve_model(EngineConfig(model_path=ALIAS))
    assert given.tokenizer_dir is not None
    tokenizer = Tokenizer.from_file(f"{given.tokenizer_dir}/tokenizer.json")
    chat = "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(chat, add_special_tokens=False).ids
    reference = AutoModelForCausalLM.from_pretrained(
        str(DEFAULT_GGUF.parent), gguf_file=DEFAULT_GGUF.name, dtype=torch.float32
    )
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()

    weights = load_target(given, torch.float32, CPU)
    paged = Paged(num_requests=1, page_size=16)
    cache = KVCache.allocate(weights.kv_shape, paged.num_pages, paged.page_size, torch.float32, CPU)
    model = weights.attach(cache, 512)
    tokens, fresh = list(prompt), len(prompt)
    with torch.inference_mode():
        while len(tokens) < len(expected):
            output = model.forward(torch.tensor(tokens[-fresh:]), paged.rows([fresh]))
            tokens.append(int(model.logits(output.hidden[-1:]).argmax()))
            fresh = 1
    assert tokens == expected

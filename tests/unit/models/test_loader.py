"""Loading from directories: shards, formats, dtypes, and one clear error for everything that is wrong."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.tiny.models import (
    CPU,
    TinyCheckpoint,
    load_tiny_target,
    tiny_config,
    tiny_eagle3,
    tiny_target,
    write_checkpoint,
)
from torch import Tensor

from overlap_spec.config import ModelFiles
from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.attention import kv_shape_of
from overlap_spec.models.loading.draft_source import DraftSource
from overlap_spec.models.loading.loader import load_eagle3, load_target, read_target_config
from overlap_spec.models.targets.llama_config import LlamaConfig

F64 = torch.float64
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def files(directory: Path) -> ModelFiles:
    config = json.loads((directory / "config.json").read_text())
    return ModelFiles(
        weights=str(directory),
        config=config,
        tokenizer_dir=None,
        eos_token_ids=(2,),
        context_length=512,
        vocab_size=config["vocab_size"],
    )


def load(directory: Path, dtype: torch.dtype = F64) -> LoadedTarget:
    return load_target(files(directory), dtype, CPU)


def assert_same(loaded: LoadedTarget, checkpoint: TinyCheckpoint, dtype: torch.dtype = F64) -> None:
    expected = load_tiny_target(checkpoint, dtype)
    assert loaded.embedding.dtype == dtype
    assert torch.equal(loaded.embedding.weight, expected.embedding.weight)
    assert torch.equal(loaded.head.stored, expected.head.stored)
    units = torch.eye(loaded.hidden_size, dtype=dtype)  # a map of them is its weight, whatever form it has
    assert torch.equal(loaded.layers[1].mlp.gate_up(units), expected.layers[1].mlp.gate_up(units))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
def test_every_format_and_dtype(binary: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = tiny_target(1)
    assert_same(load(write_checkpoint(tmp_path, checkpoint, binary=binary), dtype), checkpoint, dtype)


def write_shards(directory: Path, checkpoint: TinyCheckpoint, name: str, save: Callable[..., Any]) -> None:
    write_checkpoint(directory, checkpoint)
    (directory / "model.safetensors").unlink()
    stem, suffix = os.path.splitext(name)
    names = sorted(checkpoint.tensors)
    shards = {f"{stem}-0000{i + 1}-of-00002{suffix}": names[i::2] for i in range(2)}
    for shard, members in shards.items():
        save({member: checkpoint.tensors[member].contiguous() for member in members}, directory / shard)
    weight_map = {member: shard for shard, members in shards.items() for member in members}
    (directory / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(("name", "save"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)])
def test_shards(name: str, save: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint = tiny_target(2)
    write_shards(tmp_path, checkpoint, name, save)
    assert_same(load(tmp_path), checkpoint)
    next(tmp_path.glob("*00002-of*")).unlink()
    with pytest.raises(CheckpointError, match=r"index\.json: shard .*00002-of-00002\S* is missing"):
        load(tmp_path)


def rewrite_index(directory: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = next(directory.glob("*.index.json"))
    index.write_text(json.dumps({"weight_map": change(json.loads(index.read_text())["weight_map"])}))


STALE: dict[str, tuple[Callable[[dict[str, str]], dict[str, str]], str]] = {
    "a shard that the index leaves out": (
        lambda places: {name: shard for name, shard in places.items() if "00001-of" in shard},
        r"index\.json: weight_map names 1 shards of 2; number 2 is missing",
    ),
    "a tensor in no shard": (
        lambda places: places | {"more.weight": next(iter(places.values()))},
        r"index\.json: tensor more\.weight: found in none of its files, expected in model-00001-of-00002",
    ),
    "a tensor in another shard": (
        lambda places: places | {Q_PROJ: "model-00002-of-00002.safetensors"},
        r"index\.json: tensor \S+q_proj\.weight: found in model-00001-of-00002\.safetensors, expected in model-00002",
    ),
}


@pytest.mark.parametrize("case", STALE)
def test_an_index_that_does_not_fit_its_shards(case: str, tmp_path: Path) -> None:
    write_shards(tmp_path, tiny_target(2), "model.safetensors", save_file)
    change, message = STALE[case]
    rewrite_index(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(("name", "save"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)])
def test_a_tensor_in_two_shards(name: str, save: Callable[..., Any], tmp_path: Path) -> None:
    write_shards(tmp_path, tiny_target(2), name, save)
    first, second = sorted(tmp_path.glob("*-of-00002*"))
    both = {Q_PROJ: torch.zeros(64, 32)}
    save(both, first)
    save(both, second)
    with pytest.raises(CheckpointError, match=r"00002-of-00002\S*: tensor \S+q_proj\.weight: found in \S+00001-of"):
        load(tmp_path)


def test_names_without_prefix_and_old_buffers(tmp_path: Path) -> None:
    checkpoint = tiny_target(3)
    tensors = {name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors.items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    assert_same(load(write_checkpoint(tmp_path, TinyCheckpoint(checkpoint.config, tensors))), checkpoint)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    loaded = load(write_checkpoint(tmp_path, tiny_target(4, tie_word_embeddings=True)))
    assert loaded.head.stored is loaded.embedding.weight
    expected = sum(tensor.nbytes for tensor in tiny_target(4, tie_word_embeddings=True).tensors.values())
    assert loaded.num_bytes == expected, "counted once"


def test_progress_ends_at_the_number_of_tensors(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    directory = write_checkpoint(tmp_path, tiny_target(5))
    load_target(files(directory), F64, CPU, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(tiny_target(5).tensors),) * 2


def test_sizes_are_known_before_weights_are_read(tmp_path: Path) -> None:
    config = tiny_config(layers=3)
    given = ModelFiles(
        weights=str(tmp_path), config=config, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128
    )
    read = read_target_config(given)
    assert isinstance(read, LlamaConfig) and (read.num_layers, read.vocab_size) == (3, 128)
    kv_shape = kv_shape_of([read.attention_shape(window) for window in read.windows])
    assert kv_shape.bytes_per_token(torch.float32) == 2 * 3 * 2 * 16 * 4


def without(name: str) -> Callable[[TinyCheckpoint], TinyCheckpoint]:
    return lambda c: TinyCheckpoint(c.config, {key: value for key, value in c.tensors.items() if key != name})


def with_tensors(**tensors: Tensor) -> Callable[[TinyCheckpoint], TinyCheckpoint]:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return lambda c: TinyCheckpoint(c.config, c.tensors | named)


def configured(**changes: Any) -> Callable[[TinyCheckpoint], TinyCheckpoint]:
    return lambda c: TinyCheckpoint(c.config | changes, c.tensors)


def mistral(**changes: Any) -> Callable[[TinyCheckpoint], TinyCheckpoint]:
    return configured(architectures=["MistralForCausalLM"], **changes)


def qwen3(**changes: Any) -> Callable[[TinyCheckpoint], TinyCheckpoint]:
    return configured(architectures=["Qwen3ForCausalLM"], **changes)


TARGET_ERRORS: dict[str, tuple[Callable[[TinyCheckpoint], TinyCheckpoint], str]] = {
    "missing tensor": (without(Q_PROJ), r"layers\.1\.self_attn\.q_proj\.weight is missing, expected shape \[64, 32\]"),
    "wrong shape": (
        with_tensors(**{Q_PROJ: torch.zeros(64, 33)}),
        r"model\.safetensors: tensor model\.layers\.1\.self_attn\.q_proj\.weight: found shape \[64, 33\], "
        r"expected \[64, 32\]",
    ),
    "unexpected tensor": (
        with_tensors(model__layers__0__self_attn__q_proj__bias=torch.zeros(64)),
        r"model\.safetensors: unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    "another type": (
        with_tensors(**{Q_PROJ: torch.zeros(64, 32, dtype=torch.int8)}),
        r"model\.safetensors: tensor model\.layers\.1\.self_attn\.q_proj\.weight: found type int8, expected one of "
        r"bfloat16, float16, float32, float64",
    ),
    "tied, and a head of its own": (
        configured(tie_word_embeddings=True),
        r"lm_head\.weight: found other values than those of embed_tokens\.weight, .* tie_word_embeddings is true",
    ),
    "not tied, and no head": (
        without("lm_head.weight"),
        r"lm_head\.weight is missing, expected shape \[128, 32\], because tie_word_embeddings is false",
    ),
    "same weight twice": (with_tensors(norm__weight=torch.zeros(32)), r"tensors \S+ and \S+ mean the same weight"),
    "a draft head": (with_tensors(fc__weight=torch.zeros(32, 64)), "--speculative-draft-model-path"),
    "unknown architecture": (configured(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not supported"),
    "no architecture": (configured(architectures=None), "architecture missing is not supported"),
    "unknown rope": (configured(rope_scaling={"rope_type": "longrope"}), "rope type 'longrope' is not supported"),
    "rope without factor": (configured(rope_scaling={"rope_type": "linear"}), "'linear' needs 'factor'"),
    "partial rope": (configured(partial_rotary_factor=0.5), "part of a head"),
    "sliding window": (configured(sliding_window=4096), "sliding_window 4096 is not supported"),
    "bad window": (mistral(sliding_window="all"), "sliding_window must be null or a positive integer, found 'all'"),
    "windows of some layers": (
        mistral(sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        "layer_types that differ are not supported",
    ),
    "layer types": (
        qwen3(use_sliding_window=True, sliding_window=8, layer_types=["chunked_attention"] * 2),
        "layer_types must be 2 times 'sliding_attention' or 'full_attention'",
    ),
    "norms of heads": (qwen3(), r"layers\.0\.self_attn\.q_norm\.weight is missing, expected shape \[16\]"),
    "biases": (
        configured(architectures=["Qwen2ForCausalLM"]),
        r"layers\.0\.self_attn\.q_proj\.bias is missing, expected shape \[64\]",
    ),
    "activation": (configured(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "quantized": (configured(quantization_config={"quant_method": "gptq"}), "gptq"),
    "no hidden size": (configured(hidden_size=None), "hidden_size must be a positive integer, it is missing"),
    "bad number": (
        configured(num_hidden_layers="two"),
        "num_hidden_layers must be an integer from 1 to 4096, found 'two'",
    ),
    "odd heads": (configured(num_key_value_heads=3), "num_attention_heads 4 is not a multiple"),
}


@pytest.mark.parametrize("case", TARGET_ERRORS)
def test_a_bad_target_is_refused(case: str, tmp_path: Path) -> None:
    spoil, message = TARGET_ERRORS[case]
    write_checkpoint(tmp_path, spoil(tiny_target(6)))
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value), "the file is named"


HEAD_ERRORS: dict[str, tuple[Callable[[TinyCheckpoint], TinyCheckpoint], str]] = {
    "narrow fc": (
        with_tensors(fc__weight=torch.zeros(32, 96)),
        r"model\.safetensors: tensor fc\.weight: found shape \[32, 96\], expected \[32, 64\]: 2 aux layers x "
        r"the target's hidden size 32",
    ),
    "long d2t": (
        with_tensors(d2t=torch.zeros(113, dtype=torch.int64)),
        r"model\.safetensors: tensor d2t: found shape \[113\], expected \[112\]",
    ),
    "d2t of another type": (with_tensors(d2t=torch.zeros(112)), "tensor d2t: found type float32, expected int64 or"),
    "d2t too large": (
        with_tensors(d2t=torch.full((112,), 17)),
        r"tensor d2t: found target ids 17 to 128, expected 0 to 127",
    ),
    "d2t negative": (with_tensors(d2t=torch.full((112,), -1)), r"tensor d2t: found target ids -1 to 110"),
    "no d2t": (without("d2t"), r"tensor d2t is missing: the head guesses 112 tokens of the target's 128"),
    "head rows": (configured(draft_vocab_size=100), r"lm_head\.weight: found shape \[112, 32\], expected \[100, 32\]"),
    "other target": (configured(target_hidden_size=64), "target of hidden size 64 .*, but the target's is 32"),
    "layer ids": (
        configured(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2]}),
        r"distinct layers of the target, 0 to 1, found \[0, 2\]",
    ),
    "no default layers": (configured(eagle_config=None), "a target of 2 layers has no default aux layers"),
    "count of layers": (configured(num_aux_hidden_states=3), "num_aux_hidden_states is 3, but 2 aux layers are named"),
    "bad draft vocab": (
        configured(draft_vocab_size="all"),
        "draft_vocab_size must be an integer from 1 to 16777216, found 'all'",
    ),
    "speculators": (configured(transformer_layer_config={}), "'speculators' layout"),
    "unknown rope": (configured(rope_scaling={"type": "dynamic", "factor": 2}), "rope type 'dynamic'"),
    "missing norm": (without("norm.weight"), r"tensor norm\.weight is missing, expected shape \[32\]"),
    "unexpected": (with_tensors(fc2__weight=torch.zeros(2, 2)), r"unexpected tensor fc2\.weight"),
}


@pytest.mark.parametrize("case", HEAD_ERRORS)
def test_a_bad_head_is_refused(case: str, tmp_path: Path) -> None:
    spoil, message = HEAD_ERRORS[case]
    write_checkpoint(tmp_path, spoil(tiny_eagle3(7, tiny_target(6))))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_eagle3(DraftSource(str(tmp_path), F64, CPU), load_tiny_target(tiny_target(6)))
    assert str(tmp_path) in str(caught.value), "the file is named"


def eagle2_tensors() -> dict[str, Tensor]:
    names = {"fc.weight": (32, 64), "fc.bias": (32,), "layers.0.self_attn.q_proj.weight": (64, 32)}
    return {name: torch.zeros(shape) for name, shape in names.items()}


OTHER_KINDS = {
    "EAGLE / EAGLE-2": eagle2_tensors(),
    "ordinary language model": tiny_target(8).tensors,
    "MTP": {"model.mtp_layers.0.input_proj.weight": torch.zeros(32, 64)},
    "no draft model known": {"something.weight": torch.zeros(2)},
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_what_is_no_eagle3_head_is_named(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TinyCheckpoint(tiny_config(), OTHER_KINDS[kind]))
    with pytest.raises(CheckpointError, match=f"expected an EAGLE-3 head, but this looks like .*{kind}"):
        load_eagle3(DraftSource(str(tmp_path), F64, CPU), load_tiny_target(tiny_target(6)))


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_target(9))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors file"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights found"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json: not an index"):
        load(tmp_path)


def test_a_bin_file_that_holds_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    write_checkpoint(tmp_path, tiny_target(10))
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: not a torch file of plain tensors"):
        load(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_head_without_config_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_eagle3(7, tiny_target(6)))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: the file is missing"):
        load_eagle3(DraftSource(str(tmp_path), F64, CPU), load_tiny_target(tiny_target(6)))

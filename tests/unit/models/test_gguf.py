"""GGUF targets: a tiny file written with the gguf package, and the default model's own file against transformers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from support.paged_rows import Paged
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.config import EngineConfig, ModelFiles, cache_directory
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import resolve_model
from overlap_spec.hub.smollm2 import ALIAS, MEMBER
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.targets.decoder import DecoderWeights

Q8 = gguf.GGMLQuantizationType.Q8_0
Q4 = gguf.GGMLQuantizationType.Q4_1
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    name = name.removeprefix("model.").removesuffix(".weight")
    top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    if name in top:
        return f"{top[name]}.weight"
    _, layer, part = name.split(".", 2)
    return f"blk.{layer}.{PARTS[part]}.weight"


def in_pairs(values: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of query and key rows: the two halves of a head, interleaved."""
    return torch.cat([torch.stack(head.chunk(2), dim=1).flatten(0, 1) for head in values.chunk(heads)])


def write_gguf(path: Path, checkpoint: TinyCheckpoint, types: dict[str, Any], **metadata: Any) -> TinyCheckpoint:
    """Write a checkpoint; `types` by the last part of a tensor's name. Returns it as quantisation leaves it."""
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(config["eos_token_id"])
    for key, value in metadata.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_string
        add(key.replace("__", "."), value)
    kept = {}
    for name, tensor in checkpoint.tensors.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        part = name.split(".")[-2]
        values = (in_pairs(tensor, heads[part]) if part in heads else tensor).to(torch.float32).numpy()
        kind = types.get(part)
        if kind is None:
            writer.add_tensor(gguf_name(name), values)
            kept[name] = tensor.float()
            continue
        packed = quantize(values, kind)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
        kept[name] = torch.from_numpy(quantized_rows(tensor, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyCheckpoint(config, kept)


def quantized_rows(tensor: Tensor, kind: Any) -> np.ndarray:
    """What is left of each row; the order of rows does not matter to it."""
    return np.asarray(dequantize(quantize(tensor.to(torch.float32).numpy(), kind), kind))


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


def test_rope_scaling_of_metadata(tmp_path: Path) -> None:
    scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    write_gguf(tmp_path / "tiny.gguf", tiny_target(2), {}, **scaling)
    assert files(tmp_path / "tiny.gguf").config["rope_parameters"] == {
        "rope_theta": 10000.0,
        "rope_type": "linear",
        "factor": 4.0,
    }


def test_what_is_no_llama_gguf_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_target(3), {}, architecture="phi3")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: general\.architecture: found 'phi3', expected 'llama'"):
        files(tmp_path / "tiny.gguf")
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

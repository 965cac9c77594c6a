"""Writes tiny checkpoints as .gguf files, as llama.cpp's converter would, and says what quantisation leaves of them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from support.tiny.models import TinyCheckpoint

KIND = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# gguf cannot quantise to these: bytes of a block, values, and where its 16-bit scales are (that of offsets last)
K_QUANTS = {
    KIND.Q2_K: (84, (80, 82)),
    KIND.Q3_K: (110, (108,)),
    KIND.Q4_K: (144, (0, 2)),
    KIND.Q5_K: (176, (0, 2)),
    KIND.Q6_K: (210, (208,)),
}


def gguf_name(name: str, architecture: str = "llama") -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    name, _, kind = name.removeprefix("model.").rpartition(".")
    if name in TOP:
        return f"{TOP[name]}.{kind}"
    _, layer, part = name.split(".", 2)
    return f"blk.{layer}.{(GEMMA_PARTS if architecture == 'gemma3' else PARTS)[part]}.{kind}"


def in_pairs(values: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of query and key rows: the two halves of a head, interleaved."""
    return torch.cat([torch.stack(head.chunk(2), dim=1).flatten(0, 1) for head in values.chunk(heads)])


def from_pairs(values: Tensor, heads: int) -> Tensor:
    """Undo `in_pairs`."""
    return torch.cat([torch.cat((head[::2], head[1::2])) for head in values.chunk(heads)])


def random_blocks(values: np.ndarray, kind: Any, seed: int) -> np.ndarray:
    """Valid blocks whose values deviate as much as the given ones, and have nothing else to do with them."""
    size, scales = K_QUANTS[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (values.size // 256, size), dtype=np.uint8)
    for at in scales:
        blocks[:, at : at + 2] = np.full((len(blocks), 1), 1e-3, np.float16).view(np.uint8)
    deviation = float(np.std(dequantize(blocks.reshape(len(values), -1), kind)))
    for at in scales:
        scale = np.full((len(blocks), 1), 1e-3 * float(np.std(values)) / deviation, np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    return blocks.reshape(len(values), -1)


def write_gguf(path: Path, checkpoint: TinyCheckpoint, types: dict[str, Any], **metadata: Any) -> TinyCheckpoint:
    """Write a checkpoint; `types` by the last part of a tensor's name. Returns it as quantisation leaves it."""
    config = checkpoint.config
    architecture = metadata.pop("architecture", None) or ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config)
    for key, value in metadata.items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key.replace("__", "."), value)
    kept = {}
    for index, (name, tensor) in enumerate(checkpoint.tensors.items()):
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        part = name.split(".")[-2]
        num_pairs = heads.get(part) if architecture == "llama" else None
        values = (tensor if num_pairs is None else in_pairs(tensor, num_pairs)).to(torch.float32).numpy()
        shift = architecture == "gemma3" and name.endswith("norm.weight")
        kind = types.get(part) if tensor.dim() == 2 else None
        if kind is None:
            writer.add_tensor(gguf_name(name, architecture), values + np.float32(shift))
            kept[name] = torch.from_numpy(values + np.float32(shift)) - float(shift)
        else:
            packed = random_blocks(values, kind, index) if kind in K_QUANTS else quantize(values, kind)
            writer.add_tensor(gguf_name(name, architecture), packed, raw_dtype=kind)
            kept[name] = torch.from_numpy(np.array(dequantize(packed, kind)))
        kept[name] = kept[name] if num_pairs is None else from_pairs(kept[name], num_pairs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyCheckpoint(config, kept)


def _write_metadata(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] == "llama":
        writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(config["eos_token_id"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])

"""Tensors of a .gguf file under their Hugging Face names, dequantised.

llama.cpp orders query and key rows for rotation of neighbouring pairs; this module restores the order of halves:

    row of a head in the file   0   1   2   3  ...        row in Hugging Face's order   0  d/2   1  d/2+1 ...
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.loading.checkpoint import Shape
from overlap_spec.models.loading.gguf_file import GgufTensor, read_tensors
from overlap_spec.models.targets.llama_config import LlamaConfig

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FROM_METADATA = ("rope_freqs.weight",)  # already part of the config's rope


class GgufSource:
    """Tensors of one GGUF file of the llama architecture."""

    def __init__(self, path: Path, config: LlamaConfig) -> None:
        self.origin = str(path)
        self._config = config
        try:
            tensors = read_tensors(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from None
        self._tensors: dict[str, GgufTensor] = {
            _hugging_face_name(tensor.name): tensor for tensor in tensors if tensor.name not in _FROM_METADATA
        }

    def shapes(self) -> Mapping[str, Shape]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def file_of(self, name: str) -> str:
        return self.origin

    def dtype(self, name: str) -> torch.dtype:
        """Raises: CheckpointError if gguf cannot dequantise the tensor's type."""
        tensor = self._tensors[name]
        if tensor.is_readable:
            return torch.float32
        raise CheckpointError(f"{self.origin}: tensor {tensor.name}: type {tensor.kind.name} cannot be dequantised")

    def read(self, name: str) -> Tensor:
        """The tensor, dequantised to float32 on the CPU."""
        tensor = self._tensors[name]
        self.dtype(name)  # refuses a type that cannot be dequantised
        values = tensor.values()
        if ".q_proj." in name:
            return _in_halves(values, self._config.num_heads)
        return _in_halves(values, self._config.num_kv_heads) if ".k_proj." in name else values


def _hugging_face_name(name: str) -> str:
    """The Hugging Face name. An unknown name is kept, and the loader refuses it."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, stem, kind = match.groups()
        return f"layers.{layer}.{_LAYER[stem]}.{kind}" if stem in _LAYER else name
    stem, _, kind = name.partition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name


def _in_halves(values: Tensor, num_heads: int) -> Tensor:
    """Shapes: [heads * d, ...] -> the same."""
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)

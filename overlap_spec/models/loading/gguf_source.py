"""Tensors of a .gguf file under their Hugging Face names, dequantised.

llama.cpp orders query and key rows of the llama architecture for rotation of neighbouring pairs; this module restores
the order of halves:

    row of a head in the file   0   1   2   3  ...        row in Hugging Face's order   0  d/2   1  d/2+1 ...

Norms of gemma3 are stored as what they multiply by; Hugging Face stores what is added to one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.loading.checkpoint import Shape
from overlap_spec.models.loading.gguf_file import GgufTensor, read_tensors
from overlap_spec.models.quantization.grouped import Groups
from overlap_spec.models.targets.llama_config import LlamaConfig

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FROM_METADATA = ("rope_freqs.weight",)  # already part of the config's rope


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """How files of an architecture differ from Hugging Face's."""

    names: Mapping[str, str]  # of the tensors of a layer
    paired_heads: Mapping[str, int]  # heads of the projections whose rows are ordered in pairs
    norm_shift: float = 0.0  # what norms are stored with in addition


def gguf_layout_of(config: object, model_type: str) -> GgufLayout | None:
    """The layout of files of this model type; None if there are none. `config`: as its family reads it."""
    match model_type:
        case "llama" if isinstance(config, LlamaConfig):
            return GgufLayout(_LAYER, {"q_proj": config.num_heads, "k_proj": config.num_kv_heads})
        case "qwen2" | "qwen3":
            return GgufLayout(_LAYER, {})
        case "gemma3_text":
            return GgufLayout(_GEMMA_LAYER, {}, norm_shift=1.0)
        case _:
            return None


class GgufSource:
    """Tensors of one GGUF file."""

    def __init__(self, path: Path, layout: GgufLayout) -> None:
        self.origin = str(path)
        self._layout = layout
        try:
            tensors = read_tensors(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from None
        self._tensors: dict[str, GgufTensor] = {
            _hugging_face_name(tensor.name, layout.names): tensor
            for tensor in tensors
            if tensor.name not in _FROM_METADATA
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
        if name.endswith("norm.weight"):
            return values - self._layout.norm_shift if self._layout.norm_shift else values
        heads = self._paired_heads(name)
        return values if heads is None else _in_halves(values, heads)

    def outline(self, name: str) -> Groups | None:
        """`groups` without values."""
        return self._tensors[name].outline()

    def groups(self, name: str) -> Groups | None:
        """The tensor's integers and scales; None if it has none."""
        groups, heads = self._tensors[name].groups(), self._paired_heads(name)
        if groups is None or heads is None:
            return groups
        return groups.rows(_in_halves(torch.arange(len(groups.values)), heads))

    def _paired_heads(self, name: str) -> int | None:
        return self._layout.paired_heads.get(name.split(".")[-2])


def _hugging_face_name(name: str, of_layer: Mapping[str, str]) -> str:
    """The Hugging Face name. An unknown name is kept, and the loader refuses it."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, stem, kind = match.groups()
        return f"layers.{layer}.{of_layer[stem]}.{kind}" if stem in of_layer else name
    stem, _, kind = name.partition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name


def _in_halves(values: Tensor, num_heads: int) -> Tensor:
    """Shapes: [heads * d, ...] -> the same."""
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)

"""Tensors of a .gguf file under their Hugging Face names, dequantised.

llama.cpp orders query and key rows of the llama architecture for rotation of neighbouring pairs; this module restores
the order of halves:

    row of a head in the file   0   1   2   3  ...        row in Hugging Face's order   0  d/2   1  d/2+1 ...

Norms of gemma3 are stored as what they multiply by; Hugging Face stores what is added to one.

**Block formats** of ggml are integers of few bits, a scale for each group of them, and for some formats an offset.

    value = integer * scale + offset

A row of a tensor is a run of blocks. Blocks of 32 values are one group; blocks of 256 ("k-quants") have groups of 16 or
32, whose scales are themselves small integers times a 16-bit float. Integers, scales and products are exact in float32;
only adding the offset rounds.
torch takes the common types apart on all threads; gguf dequantises the others.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, ReaderTensor
from gguf.quants import _type_traits, dequantize, quant_shape_to_byte_shape
from numpy.typing import NDArray
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.hub.gguf_reader import TensorReader
from overlap_spec.models.loading.checkpoint import Shape
from overlap_spec.models.quantization.grouped import Groups
from overlap_spec.models.targets.llama import LlamaConfig

Parts = tuple[Tensor, Tensor, Tensor | None]  # [N, size] i8, [N, groups] f32, offsets like scales


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block, and how to take it apart."""

    num_bytes: int
    size: int  # values
    num_bits: int
    least: int
    parts: Callable[[Tensor], Parts]  # [N, num_bytes] u8

    def groups(self, data: Tensor, num_rows: int) -> Groups:
        """Shapes: data [bytes] u8."""
        values, scales, offsets = self.parts(data.view(-1, self.num_bytes))
        values, scales = values.reshape(num_rows, -1), scales.reshape(num_rows, -1)
        offsets = None if offsets is None else offsets.reshape(num_rows, -1)
        return Groups(values, scales, offsets, self.num_bits, self.least)

    def outline(self, num_rows: int, num_columns: int) -> Groups:
        """The groups of a matrix without values, on the device `meta`."""
        _, scales, offsets = self.parts(torch.zeros(1, self.num_bytes, dtype=torch.uint8))
        values = torch.empty(num_rows, num_columns, dtype=torch.int8, device="meta")
        per_row = values.new_empty(num_rows, num_columns // (self.size // scales.shape[1]), dtype=torch.float32)
        return Groups(
            values, per_row, None if offsets is None else per_row.new_empty(per_row.shape), self.num_bits, self.least
        )


def _half(block: Tensor, first: int) -> Tensor:
    """The 16-bit float at a byte. Shapes: -> [N, 1] f32."""
    return block[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of all bytes, then the high ones. Shapes: [N, n] u8 -> [N, 2 n] u8."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fifth_bits(block: Tensor, first: int) -> Tensor:
    """One bit for each of 32 values, as 16. Shapes: -> [N, 32] u8."""
    bits = block[:, first : first + 4, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits.flatten(1) & 1) << 4


def _q4_0(block: Tensor) -> Parts:
    return _nibbles(block[:, 2:]).char() - 8, _half(block, 0), None


def _q4_1(block: Tensor) -> Parts:
    return _nibbles(block[:, 4:]).char(), _half(block, 0), _half(block, 2)


def _q5_0(block: Tensor) -> Parts:
    return (_nibbles(block[:, 6:]) | _fifth_bits(block, 2)).char() - 16, _half(block, 0), None


def _q5_1(block: Tensor) -> Parts:
    return (_nibbles(block[:, 8:]) | _fifth_bits(block, 4)).char(), _half(block, 0), _half(block, 2)


def _q8_0(block: Tensor) -> Parts:
    return block[:, 2:].contiguous().view(torch.int8), _half(block, 0), None


def _q2_k(block: Tensor) -> Parts:
    small, scale, least = block[:, :16], _half(block, 80), _half(block, 82)
    return _pairs_of_bits(block[:, 16:80]).char(), scale * (small & 15), -(least * (small >> 4))


def _q3_k(block: Tensor) -> Parts:
    """The third bit has an array of its own, and 4 is subtracted where it is not set."""
    third = (block[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    values = (_pairs_of_bits(block[:, 32:96]) | third.flatten(1) << 2).char() - 4
    low, high = _nibbles(block[:, 96:104]), block[:, None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    small = (low | (high.flatten(1) & 3) << 4).char() - 32
    return values, _half(block, 108) * small, None


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """Each 32 bytes hold 128 values: the low two bits of all bytes, then the next. Shapes: [N, 64] -> [N, 256] u8."""
    halves = packed.view(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return (halves & 3).flatten(1)


def _q4_k(block: Tensor) -> Parts:
    scales, offsets = _scales_of_k(block)
    return _nibbles_of_k(block[:, 16:]).char(), scales, offsets


def _q5_k(block: Tensor) -> Parts:
    scales, offsets = _scales_of_k(block)
    fifth = (block[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return (_nibbles_of_k(block[:, 48:]) | fifth.flatten(1) << 4).char(), scales, offsets


def _nibbles_of_k(packed: Tensor) -> Tensor:
    """Each 32 bytes hold two groups. Shapes: [N, 128] -> [N, 256] u8."""
    return _nibbles(packed.reshape(-1, 32)).view(len(packed), -1)


def _scales_of_k(block: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and offsets of 6 bits in 12 bytes: four of each whole, whose top bits belong to the other four."""
    first, second, rest = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=1)
    least = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=1)
    return _half(block, 0) * scales, -(_half(block, 2) * least)


def _q6_k(block: Tensor) -> Parts:
    low = block[:, :128].view(-1, 2, 1, 64) >> torch.tensor([0, 4], dtype=torch.uint8)[:, None] & 15
    high = block[:, 128:192].view(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    values = (low.flatten(1) | high.flatten(1) << 4).char() - 32
    return values, _half(block, 208) * block[:, 192:208].contiguous().view(torch.int8), None


_KIND = GGMLQuantizationType
FORMATS = {
    _KIND.Q4_0: BlockFormat(18, 32, 4, -8, _q4_0),
    _KIND.Q4_1: BlockFormat(20, 32, 4, 0, _q4_1),
    _KIND.Q5_0: BlockFormat(22, 32, 8, 0, _q5_0),
    _KIND.Q5_1: BlockFormat(24, 32, 8, 0, _q5_1),
    _KIND.Q8_0: BlockFormat(34, 32, 8, 0, _q8_0),
    _KIND.Q2_K: BlockFormat(84, 256, 4, 0, _q2_k),
    _KIND.Q3_K: BlockFormat(110, 256, 4, -4, _q3_k),
    _KIND.Q4_K: BlockFormat(144, 256, 4, 0, _q4_k),
    _KIND.Q5_K: BlockFormat(176, 256, 8, 0, _q5_k),
    _KIND.Q6_K: BlockFormat(210, 256, 8, 0, _q6_k),
}


Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]  # the slowest dimension first
    kind: GGMLQuantizationType
    data: Bytes

    @property
    def is_readable(self) -> bool:
        """Whether `values` can dequantise the type."""
        return self.kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16) or self.kind in _type_traits

    def values(self) -> Tensor:
        """The values in float32, of a tensor that `is_readable`."""
        if self.kind is GGMLQuantizationType.F32:
            return torch.from_numpy(self.data.copy()).view(torch.float32).view(self.shape)
        if (groups := self.groups()) is not None:
            return groups.dequantised().view(self.shape)
        rows = self.data.reshape(quant_shape_to_byte_shape(self.shape, self.kind))
        return torch.from_numpy(np.require(dequantize(rows, self.kind), requirements="W")).view(self.shape)

    def groups(self) -> Groups | None:
        """The integers and scales of a quantised tensor; None for floats and for types that only gguf knows."""
        if (format_ := FORMATS.get(self.kind)) is None:
            return None
        return format_.groups(torch.from_numpy(self.data.copy()), int(np.prod(self.shape[:-1])))

    def outline(self) -> Groups | None:
        """`groups` without values, on the device `meta`."""
        format_ = FORMATS.get(self.kind)
        return None if format_ is None else format_.outline(int(np.prod(self.shape[:-1])), self.shape[-1])


def read_tensors(path: Path) -> list[GgufTensor]:
    """Every tensor, in the order of the file. Raises: OSError; ValueError if it is not a GGUF file."""
    try:
        return [_found(tensor) for tensor in TensorReader(path).tensors]
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"cut or damaged: {error}") from None


def _found(tensor: ReaderTensor) -> GgufTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return GgufTensor(tensor.name, shape, tensor.tensor_type, tensor.data.reshape(-1).view(np.uint8))


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

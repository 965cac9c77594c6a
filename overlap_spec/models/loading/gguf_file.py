"""Reads the tensors of a .gguf file, with gguf's reader.

gguf makes an object of every token in the metadata, which takes seconds; this reader skips them. torch dequantises the
common types on all threads, exactly: a 16-bit scale times an integer of few bits is exact in float32.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import _type_traits, dequantize, quant_shape_to_byte_shape
from numpy.typing import NDArray
from torch import Tensor

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
        if self.kind is GGMLQuantizationType.Q4_1:  # per 32 values: scale, least, then 16 bytes: values 0.. and 16..
            scales, packed = _blocks(self.data, 20, 2)
            return torch.addcmul(scales[:, 1:], _nibbles(packed), scales[:, :1]).view(self.shape)
        if self.kind is GGMLQuantizationType.Q8_0:  # per 32 values: scale, then 32 bytes
            scales, packed = _blocks(self.data, 34, 1)
            return (packed.view(torch.int8) * scales).view(self.shape)
        rows = self.data.reshape(quant_shape_to_byte_shape(self.shape, self.kind))
        return torch.from_numpy(np.require(dequantize(rows, self.kind), requirements="W")).view(self.shape)


def _blocks(data: Bytes, num_bytes: int, num_scales: int) -> tuple[Tensor, Tensor]:
    """Shapes: -> [blocks, num_scales] f32, [blocks, the other bytes] u8."""
    blocks = torch.from_numpy(data.copy()).view(-1, num_bytes)
    scales = blocks[:, : 2 * num_scales].contiguous().view(torch.float16).float()
    return scales, blocks[:, 2 * num_scales :].contiguous()


def _nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), dim=1).float()


def read_tensors(path: Path) -> list[GgufTensor]:
    """Every tensor, in the order of the file. Raises: OSError; ValueError if it is not a GGUF file."""
    try:
        return [_found(tensor) for tensor in _TensorReader(path).tensors]
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"cut or damaged: {error}") from None


def _found(tensor: ReaderTensor) -> GgufTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return GgufTensor(tensor.name, shape, tensor.tensor_type, tensor.data.reshape(-1).view(np.uint8))


class _TensorReader(GGUFReader):
    """gguf's reader, but it skips arrays in the metadata instead of making objects of their elements."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            parts: tuple[int, list[Any], list[int], list[GGUFValueType]] = super()._get_field_parts(orig_offs, raw_type)
            return parts
        kind, length = GGUFValueType(self._number(orig_offs, 4)), self._number(orig_offs + 4, 8)
        return self._end_of_array(kind, length, orig_offs + 12) - orig_offs, [], [], [GGUFValueType.ARRAY]

    def _end_of_array(self, kind: GGUFValueType, length: int, offset: int) -> int:
        if kind in self.gguf_scalar_to_np:
            return offset + length * int(np.dtype(self.gguf_scalar_to_np[kind]).itemsize)
        for _ in range(length):
            if kind is GGUFValueType.STRING:
                offset += 8 + self._number(offset, 8)
            else:
                offset += self._get_field_parts(offset, kind)[0]
        return offset

    def _number(self, offset: int, num_bytes: int) -> int:
        found = self.data[offset : offset + num_bytes].tobytes()
        if len(found) < num_bytes:
            raise IndexError(f"ends at byte {len(self.data)}, in the middle of its metadata")
        return int.from_bytes(found, "little")

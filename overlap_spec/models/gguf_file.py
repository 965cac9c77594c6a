"""Where a .gguf file's tensors are, and their values. Not here: names (`gguf_source.py`), metadata (`hub/`).

gguf's own reader makes an object of every token in the metadata, which takes seconds; here they are stepped over. The
common types are dequantised by torch on all threads, exactly: a 16-bit scale times a few bits is a float32.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize, quant_shape_to_byte_shape
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = "general.alignment"
_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]  # the slowest dimension first
    kind: GGMLQuantizationType
    data: Bytes

    def values(self) -> Tensor:
        """In float32. Raises: NotImplementedError for a type that gguf can only name."""
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
    """Every tensor, in the order of the file. Raises: OSError, ValueError if it is no such file."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Reader(content).tensors()
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"cut or damaged: {error}") from None


class _Reader:
    """Goes through a file's header once."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0

    def tensors(self) -> list[GgufTensor]:
        content = self._content
        self._skip(len(MAGIC))
        if content[: len(MAGIC)] != MAGIC or self._number("I") not in VERSIONS:
            raise ValueError(f"does not begin with {MAGIC.decode()} and version 2 or 3")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        alignment = 32
        for _ in range(num_fields):
            name, kind = self._text(), GGUFValueType(self._number("I"))
            value = self._field(kind)
            alignment = int(value) if name == ALIGNMENT and value else alignment
        heads = [self._head() for _ in range(num_tensors)]
        start = math.ceil(self._at / alignment) * alignment
        data = np.frombuffer(content, np.uint8)
        tensors = [GgufTensor(name, shape, kind, data[start + at :][:size]) for name, shape, kind, at, size in heads]
        if any(len(tensor.data) < head[4] for tensor, head in zip(tensors, heads, strict=True)):
            raise ValueError("shorter than its tensors")
        return tensors

    def _head(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
        """Name, shape, type, where the data begins, and its bytes. A file lists the fastest dimension first."""
        name, num_dims = self._text(), self._number("I")
        shape = tuple(self._number("Q") for _ in range(num_dims))[::-1]
        kind, at = GGMLQuantizationType(self._number("I")), self._number("Q")
        values, num_bytes = GGML_QUANT_SIZES[kind]
        return name, shape, kind, at, math.prod(shape) // values * num_bytes

    def _field(self, kind: GGUFValueType) -> float | None:
        """A field's value if it is a number; anything else is stepped over."""
        if kind is GGUFValueType.STRING:
            self._skip(self._number("Q"))
        elif kind is GGUFValueType.ARRAY:
            of, length = GGUFValueType(self._number("I")), self._number("Q")
            if of in _FORMATS:
                self._skip(struct.calcsize(_FORMATS[of]) * length)
            else:
                for _ in range(length):
                    self._field(of)
        else:
            return self._number(_FORMATS[kind])
        return None

    def _number(self, kind: str) -> int:
        (value,) = struct.unpack_from(f"<{kind}", self._content, self._at)
        self._at += struct.calcsize(kind)
        return int(value)

    def _text(self) -> str:
        length = self._number("Q")
        self._skip(length)
        return self._content[self._at - length : self._at].decode()

    def _skip(self, num_bytes: int) -> None:
        self._at += num_bytes

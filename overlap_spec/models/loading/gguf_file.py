"""Reads the tensors of a .gguf file.

torch takes the common types apart on all threads (`gguf_blocks.py`); gguf dequantises the others.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, ReaderTensor
from gguf.quants import _type_traits, dequantize, quant_shape_to_byte_shape
from numpy.typing import NDArray
from torch import Tensor

from overlap_spec.hub.gguf_reader import TensorReader
from overlap_spec.models.loading.gguf_blocks import FORMATS
from overlap_spec.models.quantization.grouped import Groups

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

"""Random weights with a model's true shapes, made on its device: `--load-format dummy`.

Speed depends on shapes, not on values, so a benchmark needs a config.json only. Values are seeded and small enough
that activations stay finite in 16 bits: linears are normal(0, 0.02) as before training, norms are 1, biases 0.
"""

import math
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from overlap_spec.config.quantization import QuantizationScheme
from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import Progress
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.loading.checkpoint import Shape
from overlap_spec.models.loading.division import Division
from overlap_spec.models.quantization.linear import LinearForms

SEED = 1234
SCALE = 0.02  # standard deviation with which Llama models are initialised
OF_FLOAT8, OF_INT4 = SCALE / 64, SCALE / 4.6  # the same, over that of random values of 8 and 4 bits
OF_FLOAT4, OF_POWERS = SCALE / 2.93, 127 - 7  # of 4-bit floats, and of mxfp4's powers of two the nearest
ONE = 0x38  # of e4m3


class DummyWeights:
    """`Weights` that makes every tensor when it is taken. A loader takes them in a fixed order, so values repeat.

    `target_ids`: the target's ids of a head's guesses, if its vocabulary is smaller. Shapes: [Vd] i64.
    """

    def __init__(
        self,
        origin: str,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        target_ids: Tensor | None = None,
    ) -> None:
        self.origin = f"{origin} (dummy weights)"
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._random = None if device.type == "meta" else torch.Generator(device).manual_seed(SEED)
        self._num_taken = 0
        self.division: Division | None = None
        self.scheme: QuantizationScheme | None = None
        self.forms = LinearForms(dtype, device)
        self._raw = {} if target_ids is None else {"d2t": target_ids - torch.arange(len(target_ids))}

    def in_format(self, scheme: QuantizationScheme | None) -> Self:
        """The same, with linears in this format."""
        self.scheme = scheme
        return self

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def names(self) -> frozenset[str]:
        """Only names that do not follow from the config: optional tensors are missing."""
        return frozenset(self._raw)

    def shape(self, name: str) -> Shape:
        return tuple(self.take_raw(name).shape)

    def file_of(self, name: str) -> str:
        return self.origin

    def covers(self, name: str) -> bool:
        return self.scheme is not None and self.scheme.covers(name)

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """See `Weights`: a new tensor, made on the device without a copy on the host.

        Of a part the whole is drawn: ranks together have the values that one alone has.
        """
        part = None if self.division is None else self.division.part_of(name)
        if part is not None:
            whole = self._drawn(name, part.shape_in_file(shape), dtype)
            return part.read(whole.__getitem__).clone()
        return self._drawn(name, shape, dtype)

    def _drawn(self, name: str, shape: Shape, dtype: torch.dtype | None) -> Tensor:
        self._num_taken += 1
        self._progress(self._num_taken, 0)
        weight = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        if name.endswith(".bias"):
            return weight.zero_()
        return weight.fill_(1.0) if len(shape) == 1 else weight.normal_(0.0, SCALE, generator=self._random)

    def take_raw(self, name: str, shape: Shape = ()) -> Tensor:
        if name not in self._raw:
            raise CheckpointError(f"{self.origin}: tensor {name} is missing")
        return self._raw[name]

    def take_grouped(self, shapes: Mapping[str, Shape], bias: Tensor | None) -> AnyLinear | None:
        """Random weights are floats."""
        return None

    def take_stored(self, name: str, shape: Shape, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """See `Weights`: random bits, with one scale for all of them and zero points in the middle.

        Of a part the whole is drawn, as for `take`.
        """
        part = None if self.division is None else self.division.part_of(name)
        if part is not None:
            whole = self._stored(name, part.shape_in_file(shape), dtypes[0])
            return part.read(whole.__getitem__).clone()
        return self._stored(name, shape, dtypes[0])

    def _stored(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point and dtype.itemsize > 1:
            if name.endswith("weight_scale_2") or name.endswith("weight_global_scale"):
                value = OF_FLOAT4 if name.endswith("_2") else 1 / OF_FLOAT4
                return torch.full(shape, value, dtype=torch.float32, device=self._device)
            is_float8 = self.scheme is not None and self.scheme.bits == 8
            wide = torch.float32 if is_float8 else torch.float16  # as published
            return torch.full(shape, OF_FLOAT8 if is_float8 else OF_INT4, dtype=wide, device=self._device)
        if name.endswith(("_scales", "_scale")):
            byte = ONE if dtype == torch.float8_e4m3fn else OF_POWERS
            return torch.full(shape, byte, dtype=torch.uint8, device=self._device).view(dtype)
        if "zero" in name:
            offset = 0 if self.scheme is None else self.scheme.zero_offset
            return torch.full(shape, _eight(8 - offset), dtype=dtype, device=self._device)
        num_bytes = math.prod(shape) * dtype.itemsize
        bits = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=self._device, generator=self._random)
        return (bits & 0xF7 if dtype == torch.float8_e4m3fn else bits).view(dtype).view(shape)  # no NaN

    def skip(self, *names: str) -> None:
        """Nothing is left over."""

    def finish(self) -> None:
        """Nothing is left over."""


def _eight(value: int) -> int:
    """Eight times these 4 bits, as a signed word."""
    word = value * 0x11111111
    return word - (1 << 32) if word >= 1 << 31 else word


def spread_target_ids(draft_vocab_size: int | None, vocab_size: int) -> Tensor | None:
    """Target ids of draft ids, ascending and spread over the vocabulary; None where both are the same.

    Shapes: -> [Vd] i64 on the CPU.
    """
    if draft_vocab_size is None or draft_vocab_size == vocab_size:
        return None
    return torch.arange(draft_vocab_size) * vocab_size // draft_vocab_size

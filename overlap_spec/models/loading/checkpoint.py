"""The tensors of one checkpoint by canonical name, checked and converted as they are taken.

Canonical names are Hugging Face's without the leading `model.`: `layers.0.self_attn.q_proj.weight`,
`embed_tokens.weight`, `norm.weight`, `lm_head.weight`.

Tensors that hold NaN or infinity are found as they are taken. A tensor's sum is not finite if one of its values is
not. Sums are left on the device and read once, at the end: a GPU adds up weights far faster than they are loaded, and
nothing waits for each of them.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from overlap_spec.config.quantization import QuantizationScheme
from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import Progress
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.loading.division import Division, Part
from overlap_spec.models.quantization.grouped import KeptIntegers, grouped_linear
from overlap_spec.models.quantization.linear import LinearForms


class FiniteSums:
    """The sums of the tensors that were taken, by name, in order."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Sum up a tensor in float32 or wider; one without values is left out. Sync: never on CUDA."""
        if tensor.is_meta:
            return
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        self._sums[name] = tensor.sum(dtype=wide)

    def suspects(self) -> list[str]:
        """Tensors whose sum is not finite, in the order in which they were taken: a large one may be just large."""
        if not self._sums:
            return []
        sums = torch.stack([each.double() for each in self._sums.values()]).tolist()
        return [name for name, value in zip(self._sums, sums, strict=True) if not math.isfinite(value)]


def damage_in(stored: Tensor, dtype: torch.dtype, where: Callable[[str], str]) -> str | None:
    """What is wrong with a tensor as it is in its file, or becomes in the model's type; None: nothing is.

    `where`: the sentence that is about the tensor.
    """
    if not (finite := stored.isfinite()).all():
        first = (~finite).nonzero()[0].tolist()
        count = int((~finite).sum())
        return where(f"{count} of its {stored.numel()} values are NaN or infinite, the first at {first}: it is damaged")
    if not stored.to(dtype).isfinite().all():
        name, most = str(dtype).removeprefix("torch."), float(stored.abs().max())
        return where(f"its largest value is {most:g}, beyond the range of {name}: use --dtype bfloat16 or float32")
    return None


Shape = tuple[int, ...]
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
WEIGHT_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

log = logging.getLogger(__name__)


class TensorSource(Protocol):
    """The files that tensors are read from: safetensors shards, .bin shards or a GGUF file."""

    origin: str  # directory or file, for messages

    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor's shape by its name in the file, without reading it."""

    def file_of(self, name: str) -> str: ...

    def dtype(self, name: str) -> torch.dtype:
        """The type in which `read` returns the tensor. Raises: CheckpointError if it is of a type unknown here."""

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU, in that type."""


@runtime_checkable
class SlicedSource(Protocol):
    """A source that reads no more of a tensor than is asked for."""

    def read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Slices of the first dimensions."""


class Weights(Protocol):
    """Tensors by canonical name: a checkpoint's, or random ones (`dummy.py`).

    Where they are divided among ranks, shapes that are asked for are those of this rank's parts.
    """

    division: Division | None  # None: all of every tensor is taken

    scheme: QuantizationScheme | None  # the format of linears; None: 16 bits or wider
    forms: LinearForms  # what the model's linears become

    @property
    def origin(self) -> str:
        """Directory or file, for messages."""

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> Shape:
        """A tensor's shape. Raises: CheckpointError if it is missing."""

    def file_of(self, name: str) -> str:
        """The file that holds a tensor."""

    def covers(self, name: str) -> bool:
        """Whether a linear has the format `scheme`, by its names here and in the file."""

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """A weight, in the model's dtype, or in `dtype`, on its device. Raises: CheckpointError."""

    def take_raw(self, name: str, shape: Shape) -> Tensor:
        """A tensor as it is in the file, on the CPU. Raises: CheckpointError."""

    def take_grouped(self, shapes: Mapping[str, Shape], bias: Tensor | None) -> AnyLinear | None:
        """A linear of these weights, below one another, that keeps their integers; None if they are to be floats."""

    def take_stored(self, name: str, shape: Shape, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """A tensor of a format of few bits, as it is in the file, on the model's device. Raises: CheckpointError."""

    def skip(self, *names: str) -> None:
        """Count tensors as used without reading them."""

    def finish(self) -> None:
        """Raises: CheckpointError naming tensors that the model has no place for, or the first that is not finite."""


class Checkpoint:
    """Hands out each tensor once. A tensor that is left at the end is an error, because it would change the result.

    On the device `meta` nothing is read but headers: tensors have a shape and a type, and no values. So a checkpoint
    is checked (`overlap-spec check`) by the code that loads it. What is said about values is said when it is loaded.
    """

    def __init__(
        self,
        source: TensorSource,
        canonical: Callable[[str], str],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        kept: KeptIntegers | None = None,
    ) -> None:
        self._source = source
        self._kept = kept
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._shapes = source.shapes()
        self._names = _canonical_names(source, self._shapes, canonical)
        self.division: Division | None = None
        self.scheme: QuantizationScheme | None = None
        self.forms = LinearForms(dtype, device)
        self._taken: set[str] = set()
        self._sums = FiniteSums()

    def in_format(self, scheme: QuantizationScheme | None) -> Self:
        """The same, with linears in this format."""
        self.scheme = scheme
        return self

    @property
    def origin(self) -> str:
        """Directory or file, for messages."""
        return self._source.origin

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def shape(self, name: str) -> Shape:
        """A tensor's shape. Raises: CheckpointError if it is missing."""
        return self._shapes[self._actual(name)]

    def file_of(self, name: str) -> str:
        """The file that holds a tensor. Raises: CheckpointError if it is missing."""
        return self._source.file_of(self._actual(name))

    def covers(self, name: str) -> bool:
        """Whether a linear has the format `scheme`, by its names here and in the file."""
        stored = self._names.get(f"{name}.weight", name).removesuffix(".weight")
        return self.scheme is not None and self.scheme.covers(name, stored)

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """A weight, in the model's dtype, or in `dtype`, on its device.

        Raises: CheckpointError naming file, tensor, found and expected.
        """
        tensor = self.take_raw(name, shape)
        if tensor.dtype not in WEIGHT_TYPES:
            raise self._unexpected(name, tensor, WEIGHT_TYPES)
        tensor = tensor.to(device=self._device, dtype=dtype or self._dtype).contiguous()
        self._sums.add(name, tensor)
        return tensor

    def take_grouped(self, shapes: Mapping[str, Shape], bias: Tensor | None) -> AnyLinear | None:
        if self._kept is None:
            return None
        stacked = [self._kept.read(self._checked(name, shape)) for name, shape in shapes.items()]
        found = [groups for groups in stacked if groups is not None]
        if len(found) < len(stacked):
            return None
        for name, groups in zip(shapes, found, strict=True):
            self.skip(name)
            if not groups.scales.is_meta:
                self._sums.add(name, groups.scales if groups.offsets is None else groups.scales + groups.offsets)
        return grouped_linear(found, bias, self._kept.kernel)

    def take_stored(self, name: str, shape: Shape, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        tensor = self.take_raw(name, shape)
        if tensor.dtype not in dtypes:
            raise self._unexpected(name, tensor, dtypes)
        return tensor.to(self._device)

    def take_raw(self, name: str, shape: Shape) -> Tensor:
        """A tensor as it is in the file, on the CPU, or without values."""
        part = None if self.division is None else self.division.part_of(name)
        actual = self._checked(name, shape if part is None else part.shape_in_file(shape))
        self.skip(name)
        if self._device.type == "meta":
            return torch.empty(shape, dtype=self._source.dtype(actual), device=self._device)
        found = self._source.read(actual) if part is None else self._read_part(actual, part)
        is_elsewhere = self.division is not None and self.division.is_added_elsewhere(name)
        return torch.zeros_like(found) if is_elsewhere else found

    def _read_part(self, actual: str, part: Part) -> Tensor:
        source = self._source
        if isinstance(source, SlicedSource):
            return part.read(lambda slices: source.read_part(actual, slices))
        return part.read(source.read(actual).__getitem__)

    def skip(self, *names: str) -> None:
        """Count tensors as used without reading them."""
        self._taken.update(name for name in names if name in self._names)
        self._progress(len(self._taken), len(self._names))

    def finish(self) -> None:
        """Raises: CheckpointError naming tensors that the model has no place for, or the first that is not finite."""
        self._refuse_damaged()
        if left := sorted(self._names[name] for name in self._names.keys() - self._taken):
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(
                f"{self._source.file_of(left[0])}: unexpected tensor {', '.join(left[:3])}{more}:"
                " the config does not ask for it, so results would differ from the model's"
            )

    def _refuse_damaged(self) -> None:
        """Rows of the embedding that no head shares are reached by their own tokens alone: those are named in the log.

        A request that has one of them ends with an error, and the others go on.
        """
        for name in self._sums.suspects():
            actual = self._names[name]
            place = f"{self._source.file_of(actual)}: tensor {actual}: "
            damage = damage_in(self._source.read(actual), self._dtype, place.__add__)
            if damage is not None and (name != EMBEDDING or HEAD not in self._names):
                raise CheckpointError(damage)
            if damage is not None:
                log.warning("%s; requests with a token of such a row will end with an error", damage)

    def _checked(self, name: str, shape: Shape) -> str:
        """The name in the source of a tensor of this shape."""
        actual = self._actual(name, shape)
        if (found := self._shapes[actual]) != shape:
            raise CheckpointError(
                f"{self._source.file_of(actual)}: tensor {actual}: found shape {list(found)}, expected {list(shape)}"
            )
        return actual

    def _unexpected(self, name: str, found: Tensor, expected: tuple[torch.dtype, ...]) -> CheckpointError:
        format_ = "no format of weights in fewer bits" if self.scheme is None else self.scheme.stored.value
        words = f"{'one of ' if len(expected) > 1 else ''}{', '.join(map(type_name, expected))}"
        return CheckpointError(
            f"{self.file_of(name)}: tensor {self._names[name]}: found type {type_name(found.dtype)}, expected {words}:"
            f" the config names {format_}"
        )

    def _actual(self, name: str, shape: Shape | None = None) -> str:
        if (actual := self._names.get(name)) is None:
            expected = "" if shape is None else f", expected shape {list(shape)}"
            raise CheckpointError(f"{self._source.origin}: tensor {name} is missing{expected}")
        return actual


def type_name(dtype: torch.dtype) -> str:
    """A type as it is named in messages."""
    return str(dtype).removeprefix("torch.")


def _canonical_names(
    source: TensorSource, shapes: Mapping[str, Shape], canonical: Callable[[str], str]
) -> dict[str, str]:
    names: dict[str, str] = {}
    for actual in shapes:
        if (other := names.setdefault(canonical(actual), actual)) != actual:
            raise CheckpointError(f"{source.file_of(actual)}: tensors {other} and {actual} mean the same weight")
    return names

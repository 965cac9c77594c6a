"""Finds tensors of a checkpoint that hold NaN or infinity, as they are taken.

A tensor's sum is not finite if one of its values is not. Sums are left on the device and read once, at the end: a GPU
adds up weights far faster than they are loaded, and nothing waits for each of them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


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

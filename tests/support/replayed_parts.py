"""Graphs on a CPU: a replay runs the part again, and writes what comes of it where the capture's result was."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar
from unittest.mock import patch

from torch import Tensor

from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.layers.attention import Forward, Forwards

Result = TypeVar("Result")


class ReplayedParts:
    """A `GraphRecorder`. What a part leaves in Python objects of its own is lost, as in a CUDA graph."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

    def record(self, part: str, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        result = run(work)
        self.counts[part] += 1
        return lambda: write(result, run(work)), result

    def finish(self) -> None:
        pass


def run(work: Callable[[], Result]) -> Result:
    with remembering_no_rows():
        return work()


def remembering_no_rows() -> AbstractContextManager[Any]:
    """Attention on a CPU remembers of rows where they are; after a replay the same rows are elsewhere."""
    return patch.object(Forwards, "of", fresh)


def fresh(forwards: Forwards, rows: RowBatch, cos_sin: Tensor, page_size: int) -> Forward:
    return Forward(rows, cos_sin, page_size)


def write(target: Any, value: Any) -> None:
    """Copy all tensors that are anywhere in a record into those of another."""
    if isinstance(target, Tensor):
        if target is not value:
            target.copy_(value)
    elif isinstance(target, tuple):
        for one, other in zip(target, value, strict=True):
            write(one, other)
    elif is_dataclass(target):
        for field in fields(target):
            write(getattr(target, field.name), getattr(value, field.name))

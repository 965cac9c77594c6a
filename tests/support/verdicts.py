"""Verdicts to compare, and memory for them in which unwritten integers are seen."""

import torch
from overlap_spec_kernels import PublishedColumns, Verdict
from torch import Tensor

UNWRITTEN = -999


def tensors_of(verdict: Verdict) -> dict[str, Tensor]:
    """What a verdict holds, by name."""
    named = {**verdict._asdict(), "published": verdict.published.rows}
    return {name: value for name, value in named.items() if value is not None}


def assert_same(actual: Verdict, expected: Verdict) -> None:
    """Equal in every integer, wherever they are."""
    wanted = tensors_of(expected)
    assert tensors_of(actual).keys() == wanted.keys()
    for name, value in tensors_of(actual).items():
        assert value.dtype == wanted[name].dtype and torch.equal(value.cpu(), wanted[name].cpu()), name


def unwritten(num_slots: int, columns: PublishedColumns, place: str = "cpu") -> Verdict:
    """Memory for a verdict."""
    verdict = Verdict.allocate(num_slots, columns, torch.device(place))
    for tensor in tensors_of(verdict).values():
        tensor.fill_(UNWRITTEN)
    return verdict

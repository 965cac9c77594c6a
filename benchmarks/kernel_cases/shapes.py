"""What the benchmark's cases have in common: models' shapes, bytes, and comparing an op with its reference."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from overlap_spec_kernels.linear.dense import DenseWeight
from overlap_spec_kernels.norm.normed import Norm, Normed
from torch import Tensor

from kernel_cases.inputs import HeadShape

DTYPE = torch.bfloat16
TOLERANCE = 2**-6  # relative and absolute, of bfloat16 against the reference in float32
EPS = 1e-5
PAGE_SIZE = 16


class Shape(NamedTuple):
    """Widths of a model's layers, and rows of its head and its draft's."""

    hidden: int
    intermediate: int
    heads: HeadShape
    vocabulary: int
    draft_vocabulary: int


MODELS = {
    "SmolLM2-135M": Shape(576, 1536, HeadShape(9, 3, 64), 49152, 8192),
    "Llama-3.1-8B": Shape(4096, 14336, HeadShape(32, 8, 128), 128256, 32000),
}


def random_rows(device: str, *size: int, scale: float = 1.0) -> Tensor:
    """Normal values. Shapes: -> size."""
    return torch.randn(size, dtype=DTYPE, device=device) * scale


def widened(value: Any) -> Any:
    """A 16-bit tensor as float32, a dense weight as its matrix, for a reference; anything else as it is."""
    if isinstance(value, DenseWeight):
        return widened(value.matrix)
    if isinstance(value, Normed):
        return Normed(value.values.float(), value.weighted.float(), value.squares, value.eps)
    if isinstance(value, Norm):
        return Norm(value.weight.float(), value.eps)
    return value.float() if isinstance(value, Tensor) and value.dtype == DTYPE else value


def assert_alike(actual: Any, expected: Any) -> None:
    """Floats within TOLERANCE, integers equal, tuples part by part. Raises: AssertionError."""
    if isinstance(actual, Normed):  # the reference's norm is finished, a kernel's is not
        assert_alike((actual.values, actual.normalised()), (expected.values, expected.normalised()))
    elif isinstance(actual, tuple):
        for one, other in zip(actual, expected, strict=True):
            assert_alike(one, other)
    elif not isinstance(actual, Tensor):
        assert actual == expected
    elif actual.is_floating_point():
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, check_dtype=False)
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def bytes_of(values: Iterable[object]) -> int:
    """Bytes of all tensors among them, in tuples too."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += size_of(value)
        elif isinstance(value, tuple):
            total += bytes_of(value)
    return total


def size_of(tensor: object) -> int:
    """Bytes of a tensor."""
    assert isinstance(tensor, Tensor)
    return tensor.numel() * tensor.element_size()

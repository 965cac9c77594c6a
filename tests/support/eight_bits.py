"""Arguments of attention ops with caches of 8 bits, and how they are compared."""

from typing import Any, TypeVar

import torch
from overlap_spec_kernels.attention.kv_format import KVScales, stored
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Inputs = TypeVar("Inputs", bound=Any)  # one of the named tuples of `kernel_cases.inputs`


def in_8_bits(inputs: Inputs, kv_dtype: torch.dtype, scales: KVScales) -> Inputs:
    """The same arguments with caches of this format."""
    k, v = stored(inputs.k_cache, kv_dtype, scales.k), stored(inputs.v_cache, kv_dtype, scales.v)
    return inputs._replace(k_cache=k, v_cache=v)


def assert_close_in_8_bits(actual: Tensor, expected: Tensor) -> None:
    """The same values, but for one in a hundred that may be the next one of the format."""
    ours, theirs = (_in_order(tensor) for tensor in (actual, expected))
    assert torch.equal(actual.float().isnan(), expected.float().isnan())
    steps = (ours - theirs)[~actual.float().isnan()].abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() <= 0.01, (steps.max(), (steps > 0).float().mean())


def _in_order(values: Tensor) -> Tensor:
    """Bytes as integers in the order of the values that they stand for."""
    bits = values.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)

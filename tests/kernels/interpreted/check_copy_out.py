"""`copy_out` under the interpreter."""

import pytest
import torch
from overlap_spec_kernels.window.copy_out import _copy_out_triton


@pytest.mark.parametrize("shape", [(1, 2), (3, 5), (512,), (7, 1, 211)])
def test_copy_out(shape: tuple[int, ...]) -> None:
    source, buffer = torch.randint(-(2**62), 2**62, shape), torch.full((2000,), -5)
    _copy_out_triton(source, buffer[: source.numel()].view(shape))
    assert torch.equal(buffer[: source.numel()].view(shape), source)
    assert (buffer[source.numel() :] == -5).all()

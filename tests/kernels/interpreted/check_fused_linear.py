"""The maps whose rows wait in registers, and the last step of a maximum, under Triton's interpreter.

The other kernels are written in Gluon, which Triton's interpreter cannot run: tests/kernels/test_gluon_linears.py.
"""

import pytest
import torch
from overlap_spec_kernels.linear.call import Addition, call_of
from overlap_spec_kernels.linear.dense import fused_linear_reference, linear_add_reference
from overlap_spec_kernels.linear.linear_argmax import _best_kernel
from overlap_spec_kernels.linear.whole_rows_linear import WholeRows
from overlap_spec_kernels.norm.normed import Norm, Normed

CLOSE = {"rtol": 1e-5, "atol": 1e-4}


def tiling(block_n: int, parts: int, size_k: int) -> WholeRows:
    return WholeRows(block_n, max(128, 1 << (size_k - 1).bit_length()), parts)


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(("block_n", "parts"), [(16, 4), (8, 8)])
@pytest.mark.parametrize(("rows", "size_n", "size_k"), [(1, 24, 100), (3, 40, 576), (17, 33, 130), (16, 96, 1536)])
def test_a_layers_chain_of_maps(rows: int, size_n: int, size_k: int, block_n: int, parts: int) -> None:
    x, weight, residual = torch.randn(rows, size_k), torch.randn(size_n, size_k), torch.randn(rows, size_n)
    norm = Norm(torch.rand(size_n) + 0.5, 1e-5)
    cut, bias = tiling(block_n, parts, size_k), torch.randn(size_n) if rows > 1 else None
    call = call_of(x, weight, False, Addition(residual, norm), x.dtype, cut.block_n, bias)
    cut.run(call, cut.num_programs(weight, False))
    assert call.out is not None and call.weighted is not None
    stream, expected = (
        Normed(call.out, call.weighted, call.sums, norm.eps),
        linear_add_reference(x, weight, residual, norm, bias),
    )
    torch.testing.assert_close(stream.values, expected.values, **CLOSE)
    torch.testing.assert_close(stream.normalised(), expected.weighted, **CLOSE)
    after = torch.randn(48, size_n)
    for gated in (False, True):
        cut, bias = tiling(16, 4, size_n), None if gated else torch.randn(48)
        call = call_of(stream, after, gated, None, x.dtype, cut.block_n, bias)
        cut.run(call, cut.num_programs(after, gated))
        torch.testing.assert_close(call.out, fused_linear_reference(expected, after, gated, bias), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("programs", [1, 5, 132])
def test_the_first_of_the_best_wins(programs: int, by_row: bool) -> None:
    best = torch.randint(0, 3, (programs, 4)).float()
    best_at = torch.randperm(programs * 4).view(programs, 4).int()
    ids, out = torch.randperm(programs * 4), torch.empty(4, dtype=torch.int64)
    if by_row:  # as many programs leave them
        best, best_at = best.t().contiguous().t(), best_at.t().contiguous().t()
    options = {"MAPPED": True, "NOTHING": -2, "PDL": False, "BLOCK": 256}
    _best_kernel[(4,)](best, best_at, ids, out, programs, *best.stride(), **options)
    for row in range(4):
        highest = best[:, row].max()
        assert out[row] == ids[best_at[best[:, row] == highest, row].min().long()]

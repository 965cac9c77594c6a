"""The column of each row's largest logit, found without writing the logits to memory."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, require
from overlap_spec_kernels.limits import NO_TOKEN
from overlap_spec_kernels.linear.call import Call
from overlap_spec_kernels.linear.fused_linear import require_linear
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.norm.normed import Normed, rows_of


class Cut(Protocol):
    """How a linear is divided among programs, each of which finds the best of its columns."""

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """Number of programs that share each row."""

    def run(self, call: Call, programs: int) -> None:
        """Write `call.best` and `call.best_at`. Sync: never."""


def linear_argmax(x: Tensor | Normed, weight: LinearOperand, ids: Tensor | None = None) -> Tensor:
    """`(x @ weight.T).argmax(1)` of the normalised rows, the first of equal logits; mapped through `ids` if given.

    Where the largest logit is NaN or infinite: `NO_TOKEN`, or some id of `ids` (`largest_columns`).
    Logits are float32, or as wide as x. Shapes: x [T, H], weight [V, H], ids [V] i64 -> [T] i64.
    Raises: ValueError naming the argument. Sync: never.
    """
    require_linear(rows_of(x), weight)
    require(ids is None or (ids.shape == weight.shape[:1] and ids.dtype == torch.int64), "ids", "[V] int64")
    return weight.argmax(x, ids)


def argmax_of_programs(rows: Tensor, weight: Tensor, ids: Tensor | None, cut: Cut, by_row: bool) -> Tensor:
    """Run `cut`, then find the best of what its programs found; `by_row`: they leave one row's together.

    A norm's scale is positive and does not change a row's argmax, so it is left out.
    """
    programs, num_rows = cut.num_programs(weight, False), rows.shape[0]
    best = _empty_best(programs, num_rows, rows.device, by_row)
    best_at = torch.empty_like(best, dtype=torch.int32)
    cut.run(Call(rows, weight, None, 0.0, False, best=best, best_at=best_at), programs)
    out = rows.new_empty((num_rows,), dtype=torch.int64)
    _best_kernel[(num_rows,)](
        best,
        best_at,
        out if ids is None else ids,
        out,
        programs,
        *best.stride(),
        MAPPED=ids is not None,
        NOTHING=NO_TOKEN,
        BLOCK=next_power_of_2(programs),
        num_warps=4,
        **dependent_launch(rows.device),
    )
    return out


def _empty_best(programs: int, num_rows: int, device: torch.device, by_row: bool) -> Tensor:
    """Shapes: -> [programs, T] f32."""
    if by_row:
        return torch.empty((num_rows, programs), dtype=torch.float32, device=device).t()
    return torch.empty((programs, num_rows), dtype=torch.float32, device=device)


@TritonKernel.with_options(do_not_specialize=("program_step", "row_step"))
def _best_kernel(
    best_ptr: tl.tensor, best_at_ptr: tl.tensor, ids_ptr: tl.tensor, out_ptr: tl.tensor, num_programs: int,
    program_step: int, row_step: int, MAPPED: tl.constexpr, NOTHING: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row."""
    wait_for_inputs(PDL)
    program = tl.arange(0, BLOCK)
    place = program * program_step + tl.program_id(0) * row_step
    best = tl.load(best_ptr + place, mask=program < num_programs, other=float("-inf"))
    at = tl.load(best_at_ptr + place, mask=program < num_programs, other=2147483647)
    highest = tl.max(best, axis=0)
    column = tl.min(tl.where(best == highest, at, 2147483647), axis=0).to(tl.int64)
    # Of NaN alone no program has found a column: what it has left as one may be none.
    column = tl.where((highest > float("-inf")) & (highest < float("inf")), column, NOTHING)
    if MAPPED:
        column = tl.load(ids_ptr + tl.maximum(column, 0))
    tl.store(out_ptr + tl.program_id(0), column)

"""A row that was projected: its convolution and its gates, of windows and of output that is computed again."""

from __future__ import annotations

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel

COLUMNS = 16  # of a state that a program of windows has
# Of all programs that add up: one warp needs no barrier. Of two products that are added a compiler may leave either
# unrounded, and it does not choose alike in every kernel: so both are rounded.
ADDS_UP = {"num_warps": 1, "enable_fp_fusion": False}


@TritonKernel
def new_row(
    new_ptr: tl.tensor, window_ptr: tl.tensor, token: tl.tensor, accepted: tl.tensor, total: tl.tensor,
    column: tl.tensor, new_column: tl.tensor, inside: tl.tensor, R: tl.constexpr, STRIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Some columns of a token, whose tensors begin at these addresses; zeros behind the last one.

    Columns of the window and of the tensor of new rows may have other numbers.
    """
    is_new = token >= accepted
    pending = tl.load(window_ptr + token * R + column, mask=inside & (token < accepted), other=0.0).to(tl.float32)
    new = tl.load(
        new_ptr + (token - accepted).to(tl.int64) * STRIDE + new_column,
        mask=inside & is_new & (token < total),
        other=0.0,
    ).to(tl.float32)
    return tl.where(is_new, new, pending)


@TritonKernel
def old_row(
    inputs_ptr: tl.tensor, row: tl.constexpr, column: tl.tensor, inside: tl.tensor, C: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Some columns of a row that was convolved before, of which there may be none: zeros."""
    return tl.load(inputs_ptr + row * C + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)


@TritonKernel
def weights_of(
    conv_ptr: tl.tensor, row: tl.constexpr, column: tl.tensor, inside: tl.tensor, K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The convolution's weights of a row: zeros of those before its first."""
    return tl.load(conv_ptr + column * K + row, mask=inside & (row >= 0), other=0.0).to(tl.float32)


@TritonKernel
def silu(x: tl.tensor) -> tl.tensor:
    """x times its sigmoid."""
    return x / (1.0 + tl.exp(-x))


@TritonKernel
def silu_sum(bias_ptr: tl.tensor, column: tl.tensor, inside: tl.tensor, total: tl.tensor) -> tl.tensor:
    """SiLU of the convolution's sum and its bias, if there is one."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return silu(total)


@TritonKernel
def softplus(step: tl.tensor) -> tl.tensor:
    """log(1 + exp(step)), of any size."""
    return tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))

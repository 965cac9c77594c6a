"""The order in which a linear in 16 bits adds up K on a Hopper, by the number of rows: what chooses it, without a GPU.

Tensor cores give a row the same bits in tiles of every shape as long as K is walked in one order (measured on an H200:
146 shapes of tiles, bfloat16 and float16). So two numbers of rows have the same bits where their orders are equal.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from overlap_spec_kernels.linear import (
    ordered,
    packed_products,
    short_linear,
    streamed_linear,
    warpgroup_linear,
    whole_rows_linear,
    wide_linear,
)
from overlap_spec_kernels.linear.call import num_columns
from overlap_spec_kernels.linear.dense import cut_for, whole_rows_for
from overlap_spec_kernels.linear.packed_products import parts_in_one_order, products_in_one_order
from overlap_spec_kernels.linear.packing import Order, Packing
from overlap_spec_kernels.linear.short_linear import Short, short_for
from overlap_spec_kernels.linear.streamed_linear import Stream
from overlap_spec_kernels.linear.warpgroup_linear import Tiles
from overlap_spec_kernels.linear.whole_rows_linear import WholeRows
from overlap_spec_kernels.linear.wide_linear import wide_for

MULTIPROCESSORS = 132
IN_ORDER = "from the first column to the last"
BLAS = "as cuBLAS chooses"

SHAPES = {  # model: linear: O, I and whether it is gated
    "SmolLM2": {
        "qkv": (960, 576, False),
        "output": (576, 576, False),
        "gate, up": (3072, 576, True),
        "down": (576, 1536, False),
        "head": (49152, 576, False),
    },
    "1B": {
        "qkv": (3072, 2048, False),
        "output": (2048, 2048, False),
        "gate, up": (16384, 2048, True),
        "down": (2048, 8192, False),
        "head": (128256, 2048, False),
    },
    "8B": {
        "qkv": (6144, 4096, False),
        "output": (4096, 4096, False),
        "gate, up": (28672, 4096, True),
        "down": (4096, 14336, False),
        "head": (128256, 4096, False),
    },
}


def order_of(num_rows: int, size_n: int, size_k: int, gated: bool) -> str:
    """How K is divided, and how its parts are added."""
    with ExitStack() as patched:
        for module, name in _ASKED:
            patched.enter_context(mock.patch.object(module, name, lambda _: True))
        for module in (streamed_linear, wide_linear):
            patched.enter_context(mock.patch.object(module, "num_multiprocessors", lambda _: MULTIPROCESSORS))
        return _order_of_cut(_cut(num_rows, size_n, size_k, gated), size_k)


def order_with_the_flag(num_rows: int, size_n: int, size_k: int, gated: bool) -> str:
    """The same of an `OrderedWeight`. Programs for tiles know pieces or no division of K; the interpreter runs them."""
    x = torch.empty(num_rows, size_k, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(size_n, size_k, dtype=torch.bfloat16, device="meta")
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(ordered, "runs_gluon", lambda _: True))
        for module in (ordered, warpgroup_linear):
            patched.enter_context(mock.patch.object(module, "runs_warpgroups", lambda _: True))
        patched.enter_context(mock.patch.object(short_linear, "runs_hopper", lambda _: True))
        piece = ordered.piece_of(weight)
        cut = short_for(x, weight, gated, piece) or ordered.ordered_cut_for(x, weight, gated, piece)
    assert cut is not None or num_rows > 16
    if cut is None and piece:
        return _order_of_cut(Stream(16, 2 * piece, 2, 1, 2), size_k)
    return IN_ORDER if cut is None else _order_of_cut(cut, size_k)


def order_of_rows_in_8_bits(num_rows: int, size_n: int, size_k: int, gated: bool) -> str:
    """With the flag, of float8 values with scales of rows, as packed_products.py adds them up."""
    x = torch.empty(num_rows, size_k, dtype=torch.bfloat16, device="meta")
    data = torch.empty(size_n, size_k, dtype=torch.uint8, device="meta")
    packing = Packing(torch.empty(1, size_n, device="meta"), None, 8, 128, 0, 1, Order.FRAGMENTS)
    with mock.patch.object(packed_products, "num_multiprocessors", lambda _: MULTIPROCESSORS):
        cut = products_in_one_order(x, data, gated, packing)
    parts = parts_in_one_order(num_columns(data, gated), size_k, gated)
    if cut is None:  # wide_linear.py adds up as many
        assert num_rows > 512
    else:
        assert (cut.splits, cut.whole) == (parts, 0)
    return IN_ORDER if parts == 1 else f"{parts} parts"


_ASKED = (  # whether a kernel runs on the device
    (streamed_linear, "runs_gluon"),
    (warpgroup_linear, "runs_warpgroups"),
    (whole_rows_linear, "runs_triton"),
    (wide_linear, "runs_hopper"),
)


def _cut(num_rows: int, size_n: int, size_k: int, gated: bool) -> Any:
    x = torch.empty(num_rows, size_k, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(size_n, size_k, dtype=torch.bfloat16, device="meta")
    if cut := whole_rows_for(x, weight, gated) or cut_for(x, weight, gated):
        return cut
    wide = wide_for(x, weight, gated) if gated else None
    return wide if wide is not None and wide.is_full(x, weight, gated) else None


def _order_of_cut(cut: Any, size_k: int) -> str:
    match cut:
        case None:
            return BLAS
        case WholeRows(parts=parts, block_k=block_k):
            return f"{parts} parts of {block_k // parts} columns, added"
        case Short(piece=piece):
            return _order_of_cut(Stream(16, 2 * piece, 2, 1, 2), size_k)
        case Stream(warps_k=1):
            return IN_ORDER
        case Stream(warps_k=warps, block_k=block_k):
            return f"every {warps}th piece of {block_k // warps} columns, {warps} sums added"
        case Tiles(splits=splits) if splits > 1:
            return f"{splits} parts of {size_k // splits} columns, added in their order"
    return IN_ORDER


def classes(counts: Sequence[int], size_n: int, size_k: int, gated: bool) -> list[tuple[int, str]]:
    """The numbers of rows with which another order begins, and which."""
    found: list[tuple[int, str]] = []
    for count in counts:
        order = order_of(count, size_n, size_k, gated)
        if not found or found[-1][1] != order:
            found.append((count, order))
    return found

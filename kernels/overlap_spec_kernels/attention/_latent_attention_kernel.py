"""The Triton functions of `latent_attention`: programs that take one piece of the keys of a tile after another.

All products are transposed: keys, and then the columns of values, are the rows of a tensor core's product, and pairs of
a row and a head are its columns. So a key's latent is read once for its score and for its value, few heads waste
nothing, and an output has the same bits in a tile of any width.
"""

from __future__ import annotations

from overlap_spec_kernels.attention._decode_attention_kernel import empty_softmax
from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel


@TritonKernel.with_options(do_not_specialize=("num_requests", "num_slots", "most_tiles", "pairs", "width", "num_extra"))
def latent_attention_kernel(
    q_ptr: tl.tensor, cache_ptr: tl.tensor, page_table_ptr: tl.tensor, row_starts_ptr: tl.tensor,
    positions_ptr: tl.tensor, prefix_ptr: tl.tensor, extra_rows_ptr: tl.tensor, mask_ptr: tl.tensor,
    out_ptr: tl.tensor, sums_ptr: tl.tensor, stats_ptr: tl.tensor,
    scale_log2: float, v_scale: float, q_row_stride: int, q_head_stride: int, table_stride: int,
    num_requests: int, num_slots: int, most_tiles: int, pairs: int, width: int, num_extra: int,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr, UNIT: tl.constexpr,
    WINDOW: tl.constexpr, TREE: tl.constexpr, UNIFORM: tl.constexpr, IN_PARTS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A program takes every so many-th item: a piece of a tile's keys, or a whole tile where pieces are too many.

    Turns go to and fro, because the longest pieces of a request come first.
    """
    wait_for_inputs(PDL)
    num_tiles, num_pieces, first_rows = division(
        row_starts_ptr, positions_ptr, prefix_ptr, num_requests, width, num_extra,
        HEADS, UNIT, TREE, UNIFORM, BLOCK_H, BLOCK_B
    )  # fmt: skip
    by_piece = pieces_have_slots(num_tiles, num_pieces, num_slots, most_tiles)
    items = tl.where(by_piece, num_tiles * num_pieces, num_tiles)
    ends = tl.cumsum(items, axis=0)
    total, programs = tl.sum(items, axis=0), tl.num_programs(0)
    for turn in range(0, tl.cdiv(total, programs)):
        place = tl.where(turn % 2 == 0, tl.program_id(0), programs - 1 - tl.program_id(0))
        item = turn * programs + place
        if item < total:
            before = ends <= item
            request = tl.sum(before.to(tl.int32), axis=0)
            inside = item - tl.sum(tl.where(before, items, 0), axis=0)
            is_it = tl.arange(0, BLOCK_B) == request
            pieces = tl.sum(tl.where(is_it, num_pieces, 0), axis=0)
            first_row = tl.sum(tl.where(is_it, first_rows, 0), axis=0)
            num_rows = width
            if not UNIFORM:
                num_rows = tl.load(row_starts_ptr + request + 1) - first_row
            tile = tl.where(by_piece, inside // pieces, inside)
            piece = tl.where(by_piece, pieces - 1 - inside % pieces, 0)
            slot = tl.where(by_piece, item - inside % pieces + piece, tl.program_id(0)).to(tl.int64)
            _take_tile(
                q_ptr, cache_ptr, page_table_ptr + request.to(tl.int64) * table_stride, positions_ptr,
                prefix_ptr + request, extra_rows_ptr + request.to(tl.int64) * num_extra, mask_ptr, out_ptr,
                sums_ptr + slot * (pairs * RANK), stats_ptr + slot * (2 * pairs), scale_log2, v_scale,
                q_row_stride, q_head_stride, first_row.to(tl.int64), num_rows, tile, piece, pieces, by_piece, pairs,
                num_extra,
                HEADS, RANK, ROPE, PAGE_SIZE, UNIT, WINDOW, TREE, IN_PARTS, BLOCK_H, BLOCK_N, BLOCK_R, BLOCK_T
            )  # fmt: skip


@TritonKernel
def division(
    row_starts_ptr: tl.tensor, positions_ptr: tl.tensor, prefix_ptr: tl.tensor, num_requests: int, width: int,
    num_extra: int, HEADS: tl.constexpr, UNIT: tl.constexpr, TREE: tl.constexpr, UNIFORM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Tiles of each request, pieces of its keys, and its first row. Shapes: -> [BLOCK_B] i32 each, 0 where none is."""
    request = tl.arange(0, BLOCK_B)
    live = request < num_requests
    if UNIFORM:
        first_rows = request * width
        num_rows = tl.where(live, width, 0)
    else:
        first_rows = tl.load(row_starts_ptr + request, mask=live, other=0)
        num_rows = tl.load(row_starts_ptr + request + 1, mask=live, other=0) - first_rows
    live = live & (num_rows > 0)
    if TREE:
        num_keys = tl.load(prefix_ptr + request, mask=live, other=0).to(tl.int32)
        num_pieces = pieces_of(num_keys, UNIT) + 1
    else:
        num_keys = tl.load(positions_ptr + first_rows + num_rows - 1, mask=live, other=0).to(tl.int32) + 1
        num_pieces = pieces_of(num_keys, UNIT)
    return tl.cdiv(num_rows * HEADS, BLOCK_H), num_pieces, first_rows


@TritonKernel
def pieces_have_slots(num_tiles: tl.tensor, num_pieces: tl.tensor, num_slots: int, most_tiles: int) -> tl.tensor:
    """Whether every piece is an item of its own: if each has a slot, and tiles alone would not fill the programs."""
    return (tl.sum(num_tiles * num_pieces, axis=0) <= num_slots) & (tl.sum(num_tiles, axis=0) < most_tiles)


@TritonKernel
def pieces_of(num_keys: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Into how many pieces the keys 0..num_keys - 1 are cut: 16 of UNIT, 8 of 2 UNIT, 120 of 4, others of 8."""
    near = tl.cdiv(tl.minimum(num_keys, 16 * UNIT), UNIT)
    middle = tl.cdiv(tl.minimum(tl.maximum(num_keys - 16 * UNIT, 0), 16 * UNIT), 2 * UNIT)
    far = tl.cdiv(tl.minimum(tl.maximum(num_keys - 32 * UNIT, 0), 480 * UNIT), 4 * UNIT)
    return near + middle + far + tl.cdiv(tl.maximum(num_keys - 512 * UNIT, 0), 8 * UNIT)


@TritonKernel
def piece_start(piece: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """The first key of a piece."""
    middle = 16 * UNIT + (piece - 16) * (2 * UNIT)
    far = 32 * UNIT + (piece - 24) * (4 * UNIT)
    farthest = 512 * UNIT + (piece - 144) * (8 * UNIT)
    near = tl.where(piece < 16, piece * UNIT, middle)
    return tl.where(piece < 24, near, tl.where(piece < 144, far, farthest))


@TritonKernel
def _take_tile(
    q_ptr: tl.tensor, cache_ptr: tl.tensor, table_row_ptr: tl.tensor, positions_ptr: tl.tensor, prefix_ptr: tl.tensor,
    extra_rows_ptr: tl.tensor, mask_ptr: tl.tensor, out_ptr: tl.tensor, sums_ptr: tl.tensor, stats_ptr: tl.tensor,
    scale_log2: float, v_scale: float, q_row_stride: int, q_head_stride: int, first_row: tl.tensor,
    num_rows: tl.tensor, tile: tl.tensor, piece: tl.tensor, num_pieces: tl.tensor, by_piece: tl.tensor, pairs: int,
    num_extra: int,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr, UNIT: tl.constexpr,
    WINDOW: tl.constexpr, TREE: tl.constexpr, IN_PARTS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
) -> None:  # fmt: skip
    """One piece of a tile's keys, or all of them, one after another, whose sum waits in the program's own slot."""
    pair = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    row = first_row + pair // HEADS
    live = pair < num_rows * HEADS
    position = tl.load(positions_ptr + row, mask=live, other=-1).to(tl.int32)
    lowest_key = 0
    if WINDOW:
        lowest = tl.min(tl.where(live, position, 2147483647), axis=0)
        lowest_key = tl.maximum(lowest - (WINDOW - 1), 0)
    num_keys = tl.load(prefix_ptr).to(tl.int32) if TREE else tl.max(position, axis=0) + 1
    q_places = q_ptr + row * q_row_stride + (pair % HEADS) * q_head_stride
    column, turned = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    q_turned = tl.load(
        q_places[:, None] + RANK + turned[None, :], mask=live[:, None] & (turned < ROPE)[None, :], other=0.0
    )
    q = q_turned
    if not IN_PARTS:
        q = tl.load(q_places[:, None] + column[None, :], mask=live[:, None] & (column < RANK)[None, :], other=0.0)
    places = tl.arange(0, BLOCK_H)[None, :] * RANK + column[:, None]
    shown = live[None, :] & (column < RANK)[:, None]
    first, end = piece, piece + 1
    if not by_piece:
        end = pieces_of(num_keys, UNIT) + TREE
        first = tl.minimum(pieces_of(lowest_key + 1, UNIT), end) - 1
    total_highest, total_denominator = empty_softmax(BLOCK_H)
    for at in range(first, end):
        acc, highest, denominator = _attend_to_piece(
            q, q_turned, q_places, live, position, cache_ptr, table_row_ptr, extra_rows_ptr,
            mask_ptr + row * tl.cdiv(num_extra, 64), at, num_pieces, num_keys, num_extra, scale_log2,
            RANK, ROPE, PAGE_SIZE, UNIT, WINDOW, TREE, IN_PARTS, BLOCK_H, BLOCK_N, BLOCK_R, BLOCK_T
        )  # fmt: skip
        if by_piece & (num_pieces > 1):
            tl.store(sums_ptr + places, acc, mask=shown)
            tl.store(stats_ptr + tl.arange(0, BLOCK_H), highest, mask=live)
            tl.store(stats_ptr + pairs + tl.arange(0, BLOCK_H), denominator, mask=live)
        else:
            kept, added, total_highest, total_denominator = fold(total_highest, total_denominator, highest, denominator)
            before = tl.load(sums_ptr + places, mask=shown & (at > first), other=0.0)
            acc = tl.fma(before, kept[None, :], acc * added[None, :])
            if at + 1 < end:
                tl.store(sums_ptr + places, acc, mask=shown)
                tl.debug_barrier()
            else:
                acc = finished(acc, total_denominator[None, :], v_scale)
                out_places = (row * HEADS + pair % HEADS)[None, :] * RANK + column[:, None]
                tl.store(out_ptr + out_places, acc, mask=shown)


@TritonKernel
def fold(
    highest: tl.tensor, denominator: tl.tensor, next_highest: tl.tensor, next_denominator: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """One step of a softmax over pieces. Returns the factors of the sum so far and of the piece's, and the new state.

    Both kernels add pieces by this, then by one multiplication and one `fma`: so the bits are the same.
    """
    new_highest = tl.maximum(highest, next_highest)
    kept, added = tl.exp2(highest - new_highest), tl.exp2(next_highest - new_highest)
    return kept, added, new_highest, tl.fma(denominator, kept, next_denominator * added)


@TritonKernel
def finished(acc: tl.tensor, denominator: tl.tensor, v_scale: float) -> tl.tensor:
    """The result; zero of a row that has seen nothing."""
    return acc / tl.where(denominator > 0.0, denominator, 1.0) * v_scale


@TritonKernel
def _attend_to_piece(
    q: tl.tensor, q_turned: tl.tensor, q_places: tl.tensor, live: tl.tensor, position: tl.tensor,
    cache_ptr: tl.tensor, table_row_ptr: tl.tensor, extra_rows_ptr: tl.tensor, mask_row_ptr: tl.tensor,
    piece: tl.tensor, num_pieces: tl.tensor, num_keys: tl.tensor, num_extra: int, scale_log2: float,
    RANK: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr, IN_PARTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """An online softmax over the keys of a piece. Returns (sum of p V, highest score, sum of p).

    The last piece of a tree's rows are its extra keys. A key that no row of the tile attends to is not read: its
    memory may be unwritten. Shapes: -> [BLOCK_R, BLOCK_H], [BLOCK_H] twice.
    """
    highest, denominator = empty_softmax(BLOCK_H)
    acc = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    is_extra = TREE and piece + 1 == num_pieces
    begin = tl.where(is_extra, 0, piece_start(piece, UNIT))
    end = tl.where(is_extra, num_extra, tl.minimum(piece_start(piece + 1, UNIT), num_keys))
    offset = tl.arange(0, BLOCK_N)
    for block in range(begin, end, BLOCK_N):
        key = block + offset
        inside = key < end
        if TREE:
            visible = inside[:, None] & live[None, :]
            if is_extra:
                word = tl.load(mask_row_ptr + block // 64, mask=live, other=0)
                visible = visible & (((word[None, :] >> (key % 64).to(tl.int64)[:, None]) & 1) != 0)
                inside = tl.max(visible.to(tl.int32), axis=1) > 0
                cache_row = tl.load(extra_rows_ptr + key, mask=inside, other=0)
            else:
                if WINDOW:
                    visible = visible & (key[:, None] > (position - WINDOW)[None, :])
                page = tl.load(table_row_ptr + key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
                cache_row = page * PAGE_SIZE + key % PAGE_SIZE
        else:
            visible = key[:, None] <= position[None, :]
            if WINDOW:
                visible = visible & (key[:, None] > (position - WINDOW)[None, :])
            page = tl.load(table_row_ptr + key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            cache_row = page * PAGE_SIZE + key % PAGE_SIZE
        acc, highest, denominator = _attend_to_block(
            q, q_turned, q_places, live, cache_ptr + cache_row * (RANK + ROPE), inside, visible, acc, highest,
            denominator, scale_log2, RANK, ROPE, IN_PARTS, BLOCK_R, BLOCK_T
        )  # fmt: skip
    return acc, highest, denominator


@TritonKernel
def _attend_to_block(
    q: tl.tensor, q_turned: tl.tensor, q_places: tl.tensor, live: tl.tensor, key_ptr: tl.tensor, inside: tl.tensor,
    visible: tl.tensor, acc: tl.tensor, highest: tl.tensor, denominator: tl.tensor, scale_log2: float,
    RANK: tl.constexpr, ROPE: tl.constexpr, IN_PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """One step of the online softmax. Shapes: key_ptr, inside [n], visible [n, BLOCK_H]."""
    dtype: tl.constexpr = q_turned.dtype
    column, turned = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    latent = tl.load(key_ptr[:, None] + column[None, :], mask=inside[:, None] & (column < RANK)[None, :], other=0.0).to(
        dtype
    )
    shared = tl.load(
        key_ptr[:, None] + RANK + turned[None, :], mask=inside[:, None] & (turned < ROPE)[None, :], other=0.0
    ).to(dtype)
    scores = tl.dot(shared, tl.trans(q_turned), input_precision="ieee")
    if IN_PARTS:
        scores = _add_parts(scores, q_places, live, key_ptr, inside, dtype, RANK, BLOCK_R)
    else:
        scores = tl.dot(latent, tl.trans(q), scores, input_precision="ieee")
    scores = tl.where(visible, scores * scale_log2, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=0))
    p = tl.exp2(scores - new_highest[None, :])
    rescale = tl.exp2(highest - new_highest)
    denominator = tl.fma(denominator, rescale, sum_of_weights(p, dtype))
    acc = tl.dot(tl.trans(latent), p.to(dtype), acc * rescale[None, :], input_precision="ieee")
    return acc, new_highest, denominator


@TritonKernel
def sum_of_weights(p: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Of a block of at most 128 keys, whose weights are at most 1. Shapes: p [n, h] -> [h].

    In 16 bits they are added as whole numbers, of 2^-23: such a sum has the same bits in any order, and so in a kernel
    whose threads have other keys. That is finer than what weights are rounded to before they meet values.
    """
    if dtype == tl.float32:
        total = tl.sum(p, axis=0)
    else:
        units = (p + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
        total = tl.sum(units, axis=0).to(tl.float32) * (1.0 / (1 << 23))
    return total


@TritonKernel
def _add_parts(
    scores: tl.tensor, q_places: tl.tensor, live: tl.tensor, key_ptr: tl.tensor, inside: tl.tensor,
    dtype: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Products of latents in float32, some columns at a time: a thread holds all of its operands."""
    part: tl.constexpr = 32 if BLOCK_R > 32 else BLOCK_R
    for first in range(0, BLOCK_R, part):
        column = first + tl.arange(0, part)
        known = (column < RANK)[None, :]
        q = tl.load(q_places[:, None] + column[None, :], mask=live[:, None] & known, other=0.0)
        latent = tl.load(key_ptr[:, None] + column[None, :], mask=inside[:, None] & known, other=0.0).to(dtype)
        scores = tl.dot(latent, tl.trans(q), scores, input_precision="ieee")
    return scores


@TritonKernel.with_options(do_not_specialize=("num_requests", "num_slots", "most_tiles", "pairs", "width", "num_extra"))
def add_pieces_kernel(
    row_starts_ptr: tl.tensor, positions_ptr: tl.tensor, prefix_ptr: tl.tensor, out_ptr: tl.tensor,
    sums_ptr: tl.tensor, stats_ptr: tl.tensor, v_scale: float,
    num_requests: int, num_slots: int, most_tiles: int, pairs: int, width: int, num_extra: int,
    HEADS: tl.constexpr, RANK: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr,
    UNIFORM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_B: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row and head, columns) adds the pieces that its row has seen, in their order. Rows may be no request's.

    pairs: rows and heads of a slot, no more than BLOCK_H.
    """
    wait_for_inputs(PDL)
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    num_tiles, num_pieces, first_rows = division(
        row_starts_ptr, positions_ptr, prefix_ptr, num_requests, width, num_extra,
        HEADS, UNIT, TREE, UNIFORM, BLOCK_H, BLOCK_B
    )  # fmt: skip
    by_piece, items = pieces_have_slots(num_tiles, num_pieces, num_slots, most_tiles), num_tiles * num_pieces
    # The row's request: the last of those that begin at it or before it, and have rows.
    begun = (first_rows <= row) & (num_tiles > 0)
    request = tl.max(tl.where(begun, tl.arange(0, BLOCK_B), 0), axis=0)
    is_it = tl.arange(0, BLOCK_B) == request
    pieces = tl.sum(tl.where(is_it, num_pieces, 0), axis=0)
    first_row, end_row = tl.sum(tl.where(is_it, first_rows, 0), axis=0), row + 1
    if not UNIFORM:
        end_row = tl.load(row_starts_ptr + request + 1)
    if by_piece & (pieces > 1) & (row < end_row):
        pair = (row - first_row) * HEADS + head
        slot = tl.sum(tl.where(tl.arange(0, BLOCK_B) < request, items, 0), axis=0) + pair // BLOCK_H * pieces
        place = (slot.to(tl.int64) * pairs + pair % BLOCK_H) * RANK
        stat_ptr = stats_ptr + slot.to(tl.int64) * (2 * pairs) + pair % BLOCK_H
        column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        position = tl.load(positions_ptr + row).to(tl.int32)
        first, last = 0, pieces
        if WINDOW:
            first = tl.minimum(pieces_of(tl.maximum(position - (WINDOW - 1), 0) + 1, UNIT), pieces) - 1
        if not TREE:
            last = pieces_of(position + 1, UNIT)
        highest, denominator = empty_softmax(1)
        acc = tl.zeros([BLOCK_C], tl.float32)
        for begin in range(first, last, AT_ONCE):
            for index in tl.static_range(AT_ONCE):
                piece = begin + index
                there = piece < last
                next_highest = tl.load(stat_ptr + piece * (2 * pairs), mask=there, other=-1.0e30)
                next_denominator = tl.load(stat_ptr + piece * (2 * pairs) + pairs, mask=there, other=0.0)
                values = tl.load(
                    sums_ptr + place + piece * (pairs * RANK) + column, mask=there & (column < RANK), other=0.0
                )
                kept, added, highest, denominator = fold(highest, denominator, next_highest, next_denominator)
                acc = tl.fma(acc, kept, values * added)
        acc = finished(acc, denominator, v_scale)
        tl.store(out_ptr + tl.program_id(0).to(tl.int64) * RANK + column, acc, mask=column < RANK)

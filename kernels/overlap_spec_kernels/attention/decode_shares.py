"""Divides the keys of a batch among the programs of `decode_attention` by the requests' lengths.

An entry of the table is what one program of each KV head does: a request, a split of it, and its number of splits.
Longest requests come first, so that their programs start first. With 12 entries:

    keys of 4 requests   400  9000  0  300
    pieces of 1005       (1, 0 of 9) (1, 1 of 9) .. (1, 8 of 9) (0, 0 of 1) (3, 0 of 1) (2, 0 of 1)

A piece is about the smallest for which there are enough entries; entries left over have no splits. Any number of splits
gives the right result, whatever the lengths are by then: one table serves all layers of a step, and the draft's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, require, runs_triton

_CANDIDATES = 32  # sizes of a piece that are tried
_REQUESTS_PER_PROGRAM = 16
_BLOCK = 64  # requests, or splits of a request, at once
_MOST_SHARES = 1 << 16  # an entry has 16 bits for a split


class Division(NamedTuple):
    """What is known of a table from shapes alone."""

    num_shares: int  # entries S, more than requests
    num_at_once: int  # entries whose programs run at once; pieces are no smaller than if each had as many keys
    min_keys: int  # of a piece


def decode_shares(lengths: Tensor, division: Division) -> Tensor:
    """The table for requests with `lengths` keys in the cache: request << 32 | split << 16 | its number of splits.

    Requests of equal length get as many splits each as there are entries for, if pieces have `min_keys`. No piece is
    longer than about the spare entries' equal share of all keys.
    Shapes: lengths [B] i64 -> [S] i64. Raises: ValueError naming the argument. Sync: never.
    """
    require(lengths.dim() == 1 and lengths.dtype == torch.int64 and lengths.is_contiguous(), "lengths", "[B] int64")
    num_spare = division.num_shares - len(lengths)
    require(num_spare > 0 and division.num_shares < _MOST_SHARES, "num_shares", "more than requests, less than 65536")
    run = _decode_shares_triton if runs_triton(lengths) else decode_shares_reference
    return run(lengths, division)


def decode_shares_reference(lengths: Tensor, division: Division) -> Tensor:
    num_spare = division.num_shares - len(lengths)
    # One entry of each request is for what is left of it after whole pieces. So the spare entries are enough for these.
    upper = -(-lengths.sum() // num_spare)
    lower = torch.minimum(-(-lengths.sum() // division.num_at_once), upper)
    steps = torch.arange(_CANDIDATES, device=lengths.device)
    pieces = (lower + -(-(upper - lower) * steps // (_CANDIDATES - 1))).clamp(min=division.min_keys)
    splits = (-(-lengths[:, None] // pieces)).clamp(min=1)
    best = (splits.sum(0) <= division.num_shares).long().argmax()  # the first; the last one always fits
    splits = splits[:, best]
    order = lengths.argsort(descending=True, stable=True)
    ends = splits[order].cumsum(0)
    entry = torch.arange(division.num_shares, device=lengths.device)
    place = torch.searchsorted(ends, entry, right=True).clamp(max=len(lengths) - 1)
    request = order[place]
    split = entry - (ends - splits[order])[place]
    return torch.where(entry < ends[-1], request << 32 | split << 16 | splits[request], 0)


def _decode_shares_triton(lengths: Tensor, division: Division) -> Tensor:
    num_requests = len(lengths)
    shares = lengths.new_empty(division.num_shares)
    _decode_shares_kernel[(ceil_div(num_requests, _REQUESTS_PER_PROGRAM),)](
        lengths,
        shares,
        num_requests,
        *division,
        CANDIDATES=_CANDIDATES,
        ROWS=_REQUESTS_PER_PROGRAM,
        BLOCK=_BLOCK,
        num_warps=4,
        **dependent_launch(lengths.device),
    )
    return shares


@TritonKernel.with_options(
    do_not_specialize=("lengths_ptr", "shares_ptr", "num_requests", "num_shares", "num_at_once", "min_keys")
)
def _decode_shares_kernel(
    lengths_ptr: tl.tensor, shares_ptr: tl.tensor, num_requests: int, num_shares: int, num_at_once: int,
    min_keys: int, CANDIDATES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Every program finds the size of a piece, and writes the entries of ROWS requests; the first, those left over.

    It is compiled once for batches of all sizes, which a step without a graph may have.
    """
    wait_for_inputs(PDL)
    block = tl.arange(0, BLOCK)
    total = tl.sum(tl.zeros([BLOCK], tl.int64), axis=0)
    for begin in range(0, num_requests, BLOCK):
        request = begin + block
        total += tl.sum(tl.load(lengths_ptr + request, mask=request < num_requests, other=0), axis=0)
    upper = tl.cdiv(total, num_shares - num_requests)
    lower = tl.minimum(tl.cdiv(total, num_at_once), upper)
    pieces = (lower + tl.cdiv((upper - lower) * tl.arange(0, CANDIDATES), CANDIDATES - 1)).to(tl.int32)
    pieces = tl.maximum(pieces, min_keys)
    needed = tl.zeros([CANDIDATES], tl.int32)
    for begin in range(0, num_requests, BLOCK):
        length, request = _lengths(lengths_ptr, begin + block, num_requests)
        splits = tl.maximum(tl.cdiv(length[:, None], pieces[None, :]), 1)
        needed += tl.sum(tl.where(request[:, None] < num_requests, splits, 0), axis=0)
    # The last candidate always fits.
    piece = tl.min(tl.where(needed <= num_shares, pieces, 2147483647), axis=0)
    own_length, own = _lengths(lengths_ptr, tl.program_id(0) * ROWS + tl.arange(0, ROWS), num_requests)
    own_splits = tl.where(own < num_requests, tl.maximum(tl.cdiv(own_length, piece), 1), 0)
    first = tl.zeros([ROWS], tl.int32)
    num_used = tl.sum(tl.zeros([BLOCK], tl.int32), axis=0)
    for begin in range(0, num_requests, BLOCK):
        length, request = _lengths(lengths_ptr, begin + block, num_requests)
        splits = tl.where(request < num_requests, tl.maximum(tl.cdiv(length, piece), 1), 0)
        same_earlier = (length[None, :] == own_length[:, None]) & (request[None, :] < own[:, None])
        is_before = (length[None, :] > own_length[:, None]) | same_earlier
        first += tl.sum(tl.where(is_before, splits[None, :], 0), axis=1)
        num_used += tl.sum(splits, axis=0)
    for begin in range(0, tl.max(own_splits, axis=0), BLOCK):
        split = begin + block
        entry = own.to(tl.int64)[:, None] << 32 | split[None, :] << 16 | own_splits[:, None]
        tl.store(shares_ptr + first[:, None] + split[None, :], entry, mask=split[None, :] < own_splits[:, None])
    if tl.program_id(0) == 0:
        for begin in range(num_used, num_shares, BLOCK):
            tl.store(shares_ptr + begin + block, tl.zeros([BLOCK], tl.int64), mask=begin + block < num_shares)


@TritonKernel
def _lengths(lengths_ptr: tl.tensor, request: tl.tensor, num_requests: int) -> tuple[tl.tensor, tl.tensor]:
    """Of these requests, 0 where there is none; and the requests."""
    return tl.load(lengths_ptr + request, mask=request < num_requests, other=0).to(tl.int32), request

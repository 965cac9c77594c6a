"""What requests bring to their slots, packed into 64-bit integers for `write_slots`.

A new request's row, in this order: seed, stop_from, top_k, output_from, most_steps; temperature, top_p and min_p as
doubles; the stop ids; the columns of features, in their order.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from overlap_spec_kernels import CHANGE_FIELDS

from overlap_spec.messages import MAX_STOP_IDS, ResetSlot
from overlap_spec.sampling.stages import SlotColumns
from overlap_spec.worker.chunks import pack_ints

NUM_INTS, NUM_FLOATS = 5, 3
STOP_IDS_AT = NUM_INTS + NUM_FLOATS
ROW_WIDTH = STOP_IDS_AT + MAX_STOP_IDS
EVERYTHING = 1 << 62  # a top_k that keeps everything, steps without a limit
_SCALARS = struct.Struct(f"={NUM_INTS}q{NUM_FLOATS}d")
_NO_STOPS = pack_ints([-1] * MAX_STOP_IDS)


class SlotChange(NamedTuple):
    """What a step writes for a slot."""

    slot: int
    first_column: int  # of its page table, for the pages
    pages: Sequence[int]
    reset: ResetSlot | None  # of a request that takes the slot


def pack_changes(changes: Sequence[SlotChange], added: Sequence[SlotColumns]) -> bytes:
    """As `write_slots` takes them. `added`: by features."""
    width = ROW_WIDTH + sum([columns.width for columns in added])
    fields: list[int] = []
    pages: list[int] = []
    rows: list[bytes] = []
    pages_at = len(changes) * CHANGE_FIELDS
    resets_at = pages_at + sum(len(change.pages) for change in changes)
    for slot, first, new_pages, reset in changes:
        reset_at = -1
        if reset is not None:
            reset_at, resets_at = resets_at, resets_at + width
            rows.append(_pack_reset(reset))
            rows += [columns.pack(reset) for columns in added]
        fields += (slot, first, len(new_pages), pages_at + len(pages), reset_at)
        pages += new_pages
    return b"".join((pack_ints(fields + pages), *rows))


def most_steps(reset: ResetSlot) -> int:
    """Guesses in a row, at most, of a request's windows."""
    asked = reset.sampling.speculative.num_steps
    return EVERYTHING if asked is None else asked


def _pack_reset(reset: ResetSlot) -> bytes:
    sampling = reset.sampling
    assert sampling.seed is not None, "the tokenizer draws a seed for every request"
    temperature = 0.0 if sampling.greedy else sampling.temperature
    top_k = EVERYTHING if sampling.top_k == -1 else sampling.top_k
    ints = sampling.seed, reset.stop_from, top_k, reset.output_from, most_steps(reset)
    scalars = _SCALARS.pack(*ints, temperature, sampling.top_p, sampling.min_p)
    stops = pack_ints(reset.stop_ids)
    return b"".join((scalars, stops, _NO_STOPS[len(stops) :]))

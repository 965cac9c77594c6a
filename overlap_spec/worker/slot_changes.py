"""What requests bring to their slots, packed into 64-bit integers for `write_slots`.

A new request's row, in this order: seed, stop_from, top_k, output_from, most_steps; temperature, top_p, min_p and the
penalties as doubles; the stop ids; whether it has biases, how many bad words; the thinking budget.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from overlap_spec_kernels import CHANGE_FIELDS

from overlap_spec.messages import MAX_STOP_IDS, ResetSlot, SamplingParams
from overlap_spec.sampling.slot_lists import NO_BUDGET, packed_budget
from overlap_spec.worker.chunks import pack_ints

NUM_INTS, NUM_FLOATS, NUM_HAS = 5, 6, 2
STOP_IDS_AT = NUM_INTS + NUM_FLOATS
ROW_WIDTH = STOP_IDS_AT + MAX_STOP_IDS
RESET_WIDTH = ROW_WIDTH + NUM_HAS + len(NO_BUDGET)
EVERYTHING = 1 << 62  # a top_k that keeps everything, steps without a limit
_SCALARS = struct.Struct(f"={NUM_INTS}q{NUM_FLOATS}d")
_HAS = struct.Struct(f"={NUM_HAS}q")
_NO_STOPS, _NO_BUDGET = pack_ints([-1] * MAX_STOP_IDS), pack_ints(NO_BUDGET)


class SlotChange(NamedTuple):
    """What a step writes for a slot."""

    slot: int
    first_column: int  # of its page table, for the pages
    pages: Sequence[int]
    reset: ResetSlot | None  # of a request that takes the slot


def pack_changes(changes: Sequence[SlotChange]) -> bytes:
    """As `write_slots` takes them."""
    fields: list[int] = []
    pages: list[int] = []
    resets: list[bytes] = []
    pages_at = len(changes) * CHANGE_FIELDS
    resets_at = pages_at + sum(len(change.pages) for change in changes)
    for slot, first, new_pages, reset in changes:
        reset_at = -1
        if reset is not None:
            reset_at = resets_at + len(resets) * RESET_WIDTH
            resets.append(_pack_reset(reset))
        fields += (slot, first, len(new_pages), pages_at + len(pages), reset_at)
        pages += new_pages
    return b"".join((pack_ints(fields + pages), *resets))


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
    penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    scalars = _SCALARS.pack(*ints, temperature, sampling.top_p, sampling.min_p, *penalties)
    stops = pack_ints(reset.stop_ids)
    has = _HAS.pack(int(sampling.biases_logits), len(sampling.bad_word_ids))
    return b"".join((scalars, stops, _NO_STOPS[len(stops) :], has, _pack_budget(sampling)))


def _pack_budget(sampling: SamplingParams) -> bytes:
    if (found := sampling.thinking) is None:
        return _NO_BUDGET
    return pack_ints(packed_budget(found.budget, found.is_open, found.opening, found.closing))

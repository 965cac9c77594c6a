"""Seeded steps of a few requests through the operations on n-grams, to compare kernels with their references.

Tokens are few, so that there is much to find; requests begin anew now and then, the last row of a batch is the dummy
slot, and pages of the KV cache are in no order.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from overlap_spec_kernels import NgramLimits, NgramLog, allocate_log, with_slots
from overlap_spec_kernels.ngram.ngram_log import ALL_BANDS, BANDS
from torch import Tensor

NUM_SLOTS, DUMMY = 5, 5
LIMITS = {
    "by recency": NgramLimits(1, 12, 18, 1, 10, False),
    "by frequency": NgramLimits(2, 5, 6, 1, 3, True),
    "chains": NgramLimits(1, 3, 4, 1, 1, False),
}


def in_bands(*bands: int) -> int:
    """The bands of a slot that has not all of them, as the log has them."""
    packed = sum((i if i in bands else bands[i % len(bands)]) << 4 * i for i in range(BANDS))
    return packed - (packed >> 63 << 64)


@dataclass(frozen=True)
class NgramOps:
    """The operations, or their references, or their kernels."""

    store: Callable[..., None]
    absorb: Callable[..., None]
    match: Callable[..., Tensor]
    merge: Callable[..., Any]  # the fields of `MergedGuesses`
    lookahead: Callable[..., None]


@dataclass(frozen=True)
class NgramCase:
    """How requests are played."""

    limits: NgramLimits
    capacity: int = 1 << 14
    page_size: int = 16
    most: int = 300  # tokens that a prompt has
    num_steps: int = 8
    num_guesses: int = 11
    owners: tuple[int, ...] = (0,)  # one of them takes a slot with each request
    bands: tuple[int, ...] = (ALL_BANDS,)  # of each owner

    def play(self, ops: NgramOps, place: str = "cpu", seed: int = 0) -> list[Tensor]:
        """What comes of it: of every step its guesses, and at the end the log. On the CPU."""
        rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
        longest = self.most + 8 * self.num_steps + 8
        num_pages = -(-longest // self.page_size)
        tables = torch.zeros(NUM_SLOTS + 1, num_pages, dtype=torch.int32)
        tables[:-1] = (torch.randperm(NUM_SLOTS * num_pages, generator=draws) + 1).view(NUM_SLOTS, -1).int()
        pool = torch.zeros((NUM_SLOTS * num_pages + 1) * self.page_size, dtype=torch.int32, device=place)
        log = with_slots(allocate_log(self.capacity, pool.device), NUM_SLOTS + 1)
        log.stride.fill_(1 if set(self.bands) == {ALL_BANDS} else BANDS)
        guessed = [torch.zeros(NUM_SLOTS + 1, self.num_guesses, dtype=torch.int64, device=place) for _ in range(2)]
        lengths = [0] * NUM_SLOTS
        found: list[Tensor] = []
        for step in range(self.num_steps):
            slots = rng.sample(range(NUM_SLOTS), 3)
            begins = [step < 2 or lengths[slot] == 0 or rng.random() < 0.1 for slot in slots]
            starts = [0 if begin else lengths[slot] + 1 for slot, begin in zip(slots, begins, strict=True)]
            counts = [rng.randint(1, self.most if begin else 8) for begin in begins]
            for slot, start, count in zip(slots, starts, counts, strict=True):
                lengths[slot] = start + count - 1
            tokens = torch.randint(0, 4, (4, max(counts)), generator=draws)
            for slot, begin in zip(slots, begins, strict=True):
                if begin and len(self.owners) > 1:
                    number = rng.randrange(len(self.owners))
                    log.owner[slot], log.bands[slot] = self.owners[number], self.bands[number]
            columns = torch.tensor([[*slots, DUMMY], [*starts, 0], [*counts, 1]])
            table = tables[columns[0]].to(place)
            at, start, count = columns.to(place)
            end = start + count - 1
            ops.store(pool, table, self.page_size, start, tokens.to(place), count)
            ops.absorb(
                log, self.limits, pool, table, self.page_size, at, start, end, DUMMY, tokens.shape[1]
            )  # fmt: skip
            keys = ops.match(pool, table, self.page_size, end, self.limits)
            merged = ops.merge(keys, log, self.limits, pool, table, self.page_size, at, end, self.num_guesses)
            for rows, fresh in zip(guessed, merged, strict=False):
                rows[at] = fresh.t()
            run = tokens[:, :3].contiguous().to(place)
            levels, strength = (torch.zeros_like(guessed[0][:, 0]).scatter(0, at, value) for value in merged[2:])
            published = torch.zeros(len(at), 5, dtype=torch.int64, device=place)
            ops.lookahead(*guessed, levels, strength, at, run, at.clamp(max=2), published[:, 1:4])
            found += [keys[:3].topk(16, 1).values, *(row[..., :3] for row in merged), published[:3]]
            found.append(levels[:DUMMY])
        return [tensor.cpu() for tensor in (*found, *self._said(log), pool[self.page_size :])]

    def _said(self, log: NgramLog) -> list[Tensor]:
        """The log, as far as it has been written."""
        inside = torch.arange(log.tokens.shape[1], device=log.fill.device) < log.fill[:, None]
        said = log.tokens.masked_fill(~inside, -1)
        return [said, log.fill, log.places, log.open_page[:-1], log.opened, log.pages, log.owners]


CASES = {
    **{name: NgramCase(limits) for name, limits in LIMITS.items()},
    "a small log": NgramCase(LIMITS["by frequency"], capacity=1024, page_size=4),
    "two owners": NgramCase(LIMITS["chains"], owners=(0, 7), bands=(ALL_BANDS, ALL_BANDS)),
    "three owners in bands of their own": NgramCase(
        LIMITS["by frequency"],
        64 * 256,
        4,
        owners=(0, 1 << 40, 2),
        bands=(in_bands(1, 4, 9), in_bands(0), in_bands(3, 8)),
    ),
    "bands of a small log": NgramCase(LIMITS["by frequency"], 1024, 4, owners=(1, 2), bands=(in_bands(0), ALL_BANDS)),
    "a log of one page": NgramCase(LIMITS["chains"], capacity=256, page_size=1, most=120),
}

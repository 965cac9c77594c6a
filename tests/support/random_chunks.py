"""Chunk sizes for random schedules."""

import math
import random

from overlap_spec.messages import PrefillCosts
from overlap_spec.scheduler.limits import Beside, ChunkRoom, ChunkSizes, Limits


class RandomChunks(ChunkSizes):
    """Every step has room for another random share of what it may hold, so that prompts are cut anywhere.

    Half of the steps that can have windows and prompts have both.
    """

    def __init__(self, seed: int, limits: Limits) -> None:
        super().__init__(limits, PrefillCosts(), None)
        self._rng = random.Random(seed)
        self._held = limits

    def with_windows(self) -> bool:
        return self._rng.random() < 0.5

    def room(self, decoding: bool, beside: Beside | None = None) -> ChunkRoom:
        room = ChunkRoom(self._held, PrefillCosts(), math.inf)
        most = self._held.affordable(1.0, 0)
        room.take(0, self._rng.choice([0, most // 2, most - 1, self._rng.randrange(most)]))
        return room

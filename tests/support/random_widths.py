"""A width policy for random schedules."""

import random

from overlap_spec.messages import StepResult
from overlap_spec.scheduler.width import WidthPolicy


class RandomWidths(WidthPolicy):
    """A random width policy: runs of steps of one width, 1 more often than others."""

    learns = True

    def __init__(self, seed: int, width: int) -> None:
        self._rng, self._of_prompts = random.Random(seed), random.Random(seed)
        self._widths = range(1, width + 1)
        self._now, self._left = width, 0
        self._last, self._drafts = width, True

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        assert batch_size >= 1
        now = self._now
        self._left -= 1
        if self._left <= 0:
            self._now = self._rng.choice([1, *self._widths])
            self._left = self._rng.choice([1, 1, 2, 5, 25 if self._now == 1 else 3])
        self._last = now
        return now

    def after_prompts(self, batch_size: int) -> int:
        assert batch_size >= 1
        return self._of_prompts.choice(self._widths)

    def drafts(self) -> bool:
        if self._rng.random() < 0.2:
            self._drafts = not self._drafts
        return self._drafts or self._last > 1

    def observe(self, result: StepResult, asked: int = 0, share: float = 1.0) -> None:
        assert all(len(run) <= proposed + 1 for run, proposed in zip(result.tokens, result.num_proposed, strict=True))

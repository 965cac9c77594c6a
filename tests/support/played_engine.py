"""Engines that are played by hand, for the width policy: how guesses fare is known, and time is the costs' own."""

import random
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from overlap_spec.features.adaptive_width.scheduler import MeasuredWidth, StepSeconds
from overlap_spec.messages import StepCosts, StepResult, TreePaths


class Guesses(Protocol):
    """What windows hold."""

    def judged(self, num_guesses: int, rng: random.Random) -> tuple[int, int, list[int]]:
        """Of the first guesses: how many are accepted, how many might be, and of a tree the path."""
        ...

    def committed(self, width: int) -> float:
        """Expected tokens of a step."""
        ...


@dataclass(frozen=True)
class Chain:
    """Each guess is accepted with `rates[i]` if those before it were."""

    rates: tuple[float, ...]

    def judged(self, num_guesses: int, rng: random.Random) -> tuple[int, int, list[int]]:
        accepted = 0
        while accepted < num_guesses and rng.random() < self.rates[accepted]:
            accepted += 1
        return accepted, num_guesses, []

    def committed(self, width: int) -> float:
        return sum(accumulate((1.0, *self.rates[: width - 1]), mul))


@dataclass(frozen=True)
class Tree:
    """Column i + 1 follows column parents[i] with rates[i], if that was accepted."""

    parents: tuple[int, ...]
    rates: tuple[float, ...]

    def judged(self, num_guesses: int, rng: random.Random) -> tuple[int, int, list[int]]:
        node, path, drawn = 0, [], rng.random()
        for column in range(1, num_guesses + 1):
            if self.parents[column - 1] != node:
                continue
            drawn -= self.rates[column - 1]
            if drawn < 0:
                node, drawn = column, rng.random()
                path.append(node)
        return len(path), self._deepest(num_guesses), path

    def committed(self, width: int) -> float:
        reached = [1.0]
        for parent, rate in zip(self.parents[: width - 1], self.rates, strict=False):
            reached.append(reached[parent] * rate)
        return sum(reached)

    def _deepest(self, num_guesses: int) -> int:
        depths = [0]
        for parent in self.parents[:num_guesses]:
            depths.append(depths[parent] + 1)
        return max(depths)


@dataclass(frozen=True)
class Synthetic:
    """Synthetic acceptance of a tree whose levels lie one after another: a slot accepts `mean` - 1 guesses on average.

    `levels`: how many guesses each level has. What a window is too short for is not accepted.
    """

    mean: float
    levels: tuple[int, ...] = (4, 4, 4)

    def judged(self, num_guesses: int, rng: random.Random) -> tuple[int, int, list[int]]:
        wanted = int(self.mean) - 1 + (rng.random() < self.mean % 1)
        firsts = [first for first in accumulate((1, *self.levels[:-1])) if first <= num_guesses]
        return min(wanted, len(firsts)), len(firsts), firsts[:wanted]

    def committed(self, width: int) -> float:
        num_levels = sum(first < width for first in accumulate((1, *self.levels[:-1])))
        low, more = int(self.mean) - 1, self.mean % 1
        return 1 + (1 - more) * min(low, num_levels) + more * min(low + 1, num_levels)


class Engine:
    """Plays steps, `depth` of them in flight. Counts time and tokens."""

    def __init__(self, costs: StepCosts, guesses: Guesses, batch_size: int = 1, depth: int = 2) -> None:
        self.policy = MeasuredWidth(costs)
        self.table = StepSeconds(costs.batch_sizes, costs.seconds)
        self.guesses = guesses
        self.batch_size = batch_size
        self.seconds = self.tokens = 0.0  # of a slot
        self.widths: list[int] = []
        self._indices = {width: i for i, width in enumerate(costs.widths)}
        self._rng = random.Random(5)
        self._flight: list[tuple[StepResult, tuple[int, int, bool, float] | None]] = []
        self._depth = depth
        self._num_guesses = 0
        self._alone = 0  # the width of the last step, if it had nothing to catch up with

    def run(self, num_steps: int) -> list[int]:
        """Returns the widths of these steps."""
        begin = len(self.widths)
        for _ in range(num_steps):
            self._step()
        return self.widths[begin:]

    @property
    def current(self) -> int:
        """The width of most of the last steps: others are trials."""
        last = self.widths[-20:]
        return max(set(last), key=last.count)

    def costs(self) -> list[float]:
        """What steps of every width really take."""
        return self.table.measured(self.batch_size)

    def _step(self) -> None:
        width = self.policy.choose(self.batch_size)
        guessed = min(self._num_guesses, width - 1)
        catches_up = width > 1 and not self._num_guesses
        self._num_guesses = width - 1
        rows = [self.guesses.judged(guessed, self._rng) for _ in range(self.batch_size)]
        runs = [[7] * (1 + accepted) for accepted, _, _ in rows]
        self.widths.append(width)
        taken = self.costs()[self._indices[width]]
        timed = self.batch_size, width, True, taken
        self.seconds += taken
        self.tokens += sum(map(len, runs)) / self.batch_size
        is_chain = isinstance(self.guesses, Chain)
        trees = () if is_chain else (TreePaths([path for _, _, path in rows], [guessed] * len(rows)),)
        result = StepResult(0, runs, [most for _, most, _ in rows], 0.0, extensions=trees)
        self._flight.append((result, timed if self._alone == width else None))
        self._alone = 0 if catches_up else width
        if len(self._flight) >= self._depth:
            settled, time_of_it = self._flight.pop(0)
            self.policy.observe(settled)
            if time_of_it is not None:
                self.policy.timed(*time_of_it)

    def plain_ratio(self) -> float:
        """Tokens per second over those of plain decoding, since the start."""
        return self.tokens / self.seconds * self.costs()[0]

    def reset_clock(self) -> None:
        self.seconds = self.tokens = 0.0

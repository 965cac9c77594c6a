"""Engines that are played by hand, for the width policy: how guesses fare is known, and time is the costs' own."""

import random
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from msgspec import structs

from overlap_spec.messages import StepCosts, StepResult
from overlap_spec.scheduler.width.policy import CostTable, MeasuredWidth


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


class Engine:
    """Plays steps, `depth` of them in flight. Counts time and tokens."""

    def __init__(self, costs: StepCosts, guesses: Guesses, batch_size: int = 1, depth: int = 2) -> None:
        self.policy = MeasuredWidth(costs)
        self.table = CostTable(costs)
        self.guesses = guesses
        self.batch_size = batch_size
        self.seconds = self.tokens = 0.0
        self.widths: list[int] = []
        self._rng = random.Random(5)
        self._flight: list[StepResult] = []
        self._depth = depth
        self._num_guesses = 0

    def run(self, num_steps: int) -> list[int]:
        """Returns the widths of these steps."""
        begin = len(self.widths)
        for _ in range(num_steps):
            self._step()
        return self.widths[begin:]

    def _step(self) -> None:
        width = self.policy.choose(self.batch_size)
        guessed = min(self._num_guesses, width - 1)
        self._num_guesses = width - 1
        rows = [self.guesses.judged(guessed, self._rng) for _ in range(self.batch_size)]
        runs = [[7] * (1 + accepted) for accepted, _, _ in rows]
        self.widths.append(width)
        self.seconds += self.table.seconds(self.batch_size)[self.table.widths.index(width)]
        self.tokens += sum(map(len, runs))
        result = StepResult(0, runs, [most for _, most, _ in rows], 0.0)
        if isinstance(self.guesses, Tree):
            result = structs.replace(result, paths=[path for _, _, path in rows], last_guesses=[guessed] * len(rows))
        self._flight.append(result)
        if len(self._flight) == self._depth:
            self.policy.observe(self._flight.pop(0))

    def plain_ratio(self) -> float:
        """Tokens per second over those of plain decoding, since the start."""
        return self.tokens / self.batch_size / self.seconds * self.table.seconds(self.batch_size)[0]

    def reset_clock(self) -> None:
        self.seconds = self.tokens = 0.0

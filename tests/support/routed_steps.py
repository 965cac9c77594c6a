"""Steps of a mixture of experts: what one takes depends on how many distinct experts its rows have, which text decides.

Sizes are those of Qwen3-30B-A3B on an H200: 48 layers of 128 experts, of which a row has 8.
"""

import random
from bisect import bisect_left
from itertools import accumulate

from overlap_spec.messages import StepCosts
from support.played_engine import Engine, Guesses

EXPERTS, CHOSEN, WIDTHS = 128, 8, (1, 2, 4)
REST_S, EXPERT_S = 0.0008, 0.000113  # of what all rows share, and of one expert in each of the layers
ROW_S = 0.000004
BATCH_SIZES = (1, 8, 32, 128)
DRAWS = 32


class SkewedRouter:
    """Expert e is chosen in proportion to (e + 1) ** -skew. `skew` 0: all alike, as random tokens have them."""

    def __init__(self, skew: float = 0.0) -> None:
        self._bounds = list(accumulate((e + 1) ** -skew for e in range(EXPERTS)))
        self._drawn: dict[int, list[int]] = {}  # by rows: what some steps had
        self._rng = random.Random(7)

    def distinct(self, num_rows: int, rng: random.Random) -> int:
        """Experts that so many rows have, in one of `DRAWS` steps."""
        if num_rows not in self._drawn:
            self._drawn[num_rows] = [len(self._step(num_rows)) for _ in range(DRAWS)]
        return rng.choice(self._drawn[num_rows])

    def _step(self, num_rows: int) -> set[int]:
        """Each row has `CHOSEN` different ones."""
        found: set[int] = set()
        for _ in range(num_rows):
            row: set[int] = set()
            while len(row) < CHOSEN:
                row.add(bisect_left(self._bounds, self._rng.random() * self._bounds[-1]))
            found |= row
        return found


def seconds_of(distinct: float, num_rows: int) -> float:
    return REST_S + EXPERT_S * distinct + ROW_S * num_rows


def measured_at_start() -> StepCosts:
    """With random tokens."""
    router, rng = SkewedRouter(), random.Random(1)
    rows = [
        tuple(seconds_of(router.distinct(size * width, rng), size * width) for width in WIDTHS) for size in BATCH_SIZES
    ]
    return StepCosts(BATCH_SIZES, WIDTHS, tuple(rows))


class RoutedEngine(Engine):
    """Steps take what their rows' experts take. `skews`: of the router, each for `every` steps, round and round."""

    def __init__(self, guesses: Guesses, batch_size: int, skews: tuple[float, ...], every: int = 200) -> None:
        super().__init__(measured_at_start(), guesses, batch_size)
        self._routers = [SkewedRouter(skew) for skew in skews]
        self._every = every
        self._router_rng = random.Random(7)
        self._costs: list[float] = []  # of the last step

    def costs(self) -> list[float]:
        """Of the step that runs, at each width."""
        router = self._routers[len(self.widths) // self._every % len(self._routers)]
        rows = [self.batch_size * width for width in WIDTHS]
        self._costs = [seconds_of(router.distinct(num_rows, self._router_rng), num_rows) for num_rows in rows]
        return self._costs

    def speeds(self, num_steps: int) -> tuple[float, float]:
        """Runs so many steps. Returns tokens per second, over plain decoding's and over the best fixed width's.

        At a fixed width text changes after as many tokens as here, whatever steps it takes.
        """
        self.reset_clock()
        fixed_s = [0.0] * len(WIDTHS)
        committed = [self.guesses.committed(width) for width in WIDTHS]
        for _ in range(num_steps):
            before = self.tokens
            self._step()
            for i, cost in enumerate(self._costs):
                fixed_s[i] += (self.tokens - before) / committed[i] * cost
        return fixed_s[0] / self.seconds, min(fixed_s) / self.seconds

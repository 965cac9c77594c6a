"""What is known of steps of each width: how many tokens they commit, how long they take.

**Tokens.** A window's columns are best first and parents before children, in chains and in trees: whatever a step
accepted, one of width w would have accepted those of its columns that are below w. So a step tests its own width and
all narrower ones:

    widths        1         2                 4                        8
    columns       root      1                 2, 3                     4, 5, 6, 7
    committed     1   +     g1       +        g2          +            g3

A g is how many guesses of these columns a slot has had accepted, on average over the slots that tested them. It is a
mean of what was seen, so no estimate is above what such a window can commit. While it is not tested it fades. Guesses
of a chain that no step has tested yet are believed to be about as good as those before them, so that they are tested.

**Seconds.** A step takes what was measured at start, and an excess that each width learns from its own steps, for each
class of batch sizes (1, 2, 3-4, 5-8, ..). What makes a wide step slow, contexts that grow or a slow host, is not held
against a narrower one: that is taken, and timed, before the wide one is too slow. A wider one that was never timed is
believed to exceed its cost as the next narrower one does. What makes it fast, text whose rows share experts, is
believed of all: in proportion, so that a narrower one is not left for what it took with other text.
"""

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from overlap_spec.messages import StepResult, TreePaths, find

MEMORY, MEMORY_STEPS = 72, 2  # tests after which an older one counts 1/e; those of so many steps where that is more
FIRST_RATE, FIRST_TESTS = 0.7, 2.0  # of guesses, each after the one before it, until as many tests outweigh it
HOPED_RATE = 0.95  # of those of a good draft
DOUBTED = 3  # power of what is seen over what a good draft has, for guesses that were never tested
DOUBT = 0.2  # guesses of the width of now, over the root of the number of tests: what chance may have taken from it
FADED = 1 - 1 / 256  # what a step leaves of what it does not test
OWN_STEPS = 8  # over which a width's excess is averaged
STALE_STEPS = 256  # of wider widths, over which a narrower one loses what it exceeds its cost by more than they do
MOST_CHANGE = 0.25  # of what a step should take, is the most by which it tells otherwise: some wait for others
LEAST_COST = 0.25  # of what was measured


class TokensByWidth:
    """The tokens of this module's docstring. `widths`: ascending, from 1. Their indices stand for them."""

    def __init__(self, widths: Sequence[int]) -> None:
        groups = [range(low, high) for low, high in pairwise((0, *widths))]  # of columns; group 0 is the root
        self._widths = widths
        self._group_of = [i for i, group in enumerate(groups) for _ in group]  # each column
        self._gains = [sum(FIRST_RATE**column for column in group) for group in groups]
        self._hoped = [sum(HOPED_RATE**column for column in group) for group in groups]
        self._tests = [FIRST_TESTS] * len(groups)
        self._fresh = [0.0] * len(groups)  # 1 if the last step tested it, 0 if none did
        self._is_chain = True  # a tree's columns are right in each other's stead: one tells little of the next

    def believed(self, now: int) -> list[float]:
        """Tokens per slot, for each width. Of those wider than `now`, what was shown fades towards the narrower one."""
        gains = [gain if i <= now else gain * self._fresh[i] for i, gain in enumerate(self._gains)]
        known = sum([tests > FIRST_TESTS for tests in self._tests])  # groups beside the root, which no test is of
        if self._is_chain and 1 <= known <= max(now, 1):  # none is wider than now: others are about as good
            share = min(sum(self._gains[1 : known + 1]) / sum(self._hoped[1 : known + 1]), 1.0)
            gains[known + 1 :] = [hoped * share**DOUBTED for hoped in self._hoped[known + 1 :]]
        if now:
            gains[now] += DOUBT / math.sqrt(self._tests[now])
        return list(accumulate(gains))

    def hoped(self, now: int) -> list[float]:
        """The same if the draft were good beyond `now`."""
        return list(accumulate([*self._gains[: now + 1], *self._hoped[now + 1 :]]))

    def observe(self, result: StepResult, asked: int = 0) -> None:
        """Take in a settled decode step. A slot that has none of the guesses that were `asked` for had wrong ones."""
        trees = find(result.extensions, TreePaths)
        self._is_chain = trees is None
        paths: Iterable[int | tuple[int, ...]]  # of a chain, one beyond its last column
        paths = map(len, result.tokens) if trees is None else map(tuple, trees.paths)
        lasts = result.num_proposed if trees is None else trees.last_guesses
        by_last = defaultdict[int, list[int]](lambda: [0] * len(self._widths))  # last column with a guess -> slots,
        for (path, last), slots in Counter(zip(paths, lasts, strict=True)).items():  # then accepted of each group
            accepted = by_last[last or asked]
            accepted[0] += slots
            for column in range(1, path) if isinstance(path, int) else path:
                accepted[self._group_of[column]] += slots
        for i, width in enumerate(self._widths[1:], 1):
            testing = [accepted for last, accepted in by_last.items() if last >= width - 1]
            tests = sum([accepted[0] for accepted in testing])
            if not tests:
                self._fresh[i] *= FADED
                continue
            known = self._tests[i] if self._fresh[i] == 1.0 else min(self._tests[i], MEMORY) * (self._fresh[i] or 1.0)
            kept = known * math.exp(-tests / max(MEMORY, MEMORY_STEPS * tests))
            self._fresh[i], self._tests[i] = 1.0, kept + tests
            right = sum([accepted[i] for accepted in testing])
            self._gains[i] = (kept * self._gains[i] + right) / self._tests[i]


def size_class(batch_size: int) -> int:
    """Batch sizes of one class have about the same costs."""
    return (batch_size - 1).bit_length()


class StepSeconds:
    """The seconds of this module's docstring, for kinds of steps: widths, by index, and one without a draft."""

    def __init__(self, sizes: Sequence[int], rows: Sequence[Sequence[float]]) -> None:
        """`rows`: the seconds of every kind that were measured, for each batch size."""
        self._sizes, self._rows = (sizes, rows) if len(sizes) > 1 else ((sizes[0], sizes[0] + 1), (*rows, *rows))
        self._known: dict[int, list[float]] = {}  # what was measured, by batch size
        self._excess = defaultdict[int, dict[int, float]](dict)  # by class, of each kind that was timed

    def of(self, batch_size: int) -> list[float]:
        """For each kind."""
        costs, excess, seconds = self.measured(batch_size), self._excess[size_class(batch_size)], list[float]()
        like = min(excess, default=0)  # a kind that was timed: the nearest narrower one; at first the narrowest
        more = min(excess.get(like, 0.0), 0.0)
        for kind, cost in enumerate(costs):
            if kind in excess:
                like, more = kind, excess[kind]
            seconds.append(max(cost + _carried(more, costs[like], cost), LEAST_COST * cost))
        return seconds

    def observe(self, batch_size: int, kind: int, seconds: float) -> None:
        """Take in one step. It changes little: some wait for others on the device."""
        costs, excess = self.measured(batch_size), self._excess[size_class(batch_size)]
        known, rate = excess.get(kind, 0.0), 1 / OWN_STEPS if kind in excess else 1.0
        most = MOST_CHANGE * (costs[kind] + max(known, 0.0))
        excess[kind] = known + rate * min(max(seconds - costs[kind] - known, -most), most)
        for narrower in [each for each in excess if each < kind]:
            more = _carried(excess[kind], costs[kind], costs[narrower])
            excess[narrower] -= max(excess[narrower] - more, 0.0) / STALE_STEPS

    def measured(self, batch_size: int) -> list[float]:
        """Of each kind, at start: linear between the batch sizes that were measured, and beyond them."""
        if batch_size not in self._known:
            right = min(max(bisect.bisect_left(self._sizes, batch_size), 1), len(self._sizes) - 1)
            low, high = self._sizes[right - 1], self._sizes[right]
            part, ends = (batch_size - low) / (high - low), zip(self._rows[right - 1], self._rows[right], strict=True)
            self._known[batch_size] = [max(a + part * (b - a), a / 2) for a, b in ends]
        return self._known[batch_size]


def _carried(excess: float, cost: float, other: float) -> float:
    """What a kind of step of another cost is believed to exceed that by: as much, or as much less in proportion."""
    return excess if excess >= 0 else excess * other / cost

"""What is known of steps of each width: how many tokens they commit, how long they take.

**Tokens.** A window's columns are best first and parents before children, in chains and in trees: whatever a step
accepted, one of width w would have accepted those of its columns that are below w. So a step tests its own width and
all narrower ones:

    widths        1         2                 4                        8
    columns       root      1                 2, 3                     4, 5, 6, 7
    committed     1   +     g1       +        g2          +            g3

A g is how many guesses of these columns a slot has had accepted, on average over the slots that tested them. If the
last of these differ by more than chance, those before are forgotten. While it is not tested it fades; of the width of
now it has the benefit of the doubt. Guesses of a chain that no step has tested are believed to be like those before.

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

MEMORY, MEMORY_STEPS = 288, 2  # tests after which an older one counts 1/e; those of so many steps where that is more
RECENT = 72  # the same, of what tells that guesses have changed, and of what was known before steps without tests
CHANGED, LEAST_CHANGE = 4.0, 0.075  # deviations of such a mean, and guesses, for which what is older is forgotten
FIRST_RATE, FIRST_TESTS = 0.7, 2.0  # of guesses, each after the one before it, until as many tests outweigh it
HOPED_RATE = 0.95  # of those of a good draft
DOUBTED = 3  # power of what is seen over what a good draft has, for guesses that were never tested
DOUBT = 1.0  # standard deviations of a mean, which chance may have taken from it
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
        self._recent = list(self._gains)
        # means of a slot's accepted guesses of a group, of their square, and the same of all that are no wider
        self._means = [[g, g, n - 1, (n - 1) * n] for g, n in zip(self._gains, accumulate(self._gains), strict=True)]
        self._tests = [FIRST_TESTS] * len(groups)
        self._fresh = [0.0] * len(groups)  # 1 if the last step tested it, 0 if none did
        self._is_chain = True  # a tree's columns are right in each other's stead: one tells little of the next

    def believed(self, now: int, behind: float = 0.0) -> list[float]:
        """Tokens of a slot that is so many deviations behind, for each width. Of those wider than `now` they fade."""
        gains = [gain if i <= now else gain * self._fresh[i] for i, gain in enumerate(self._gains)]
        known = sum([tests > FIRST_TESTS for tests in self._tests])  # groups beside the root, which no test is of
        if self._is_chain and 1 <= known <= max(now, 1):  # none is wider than now: others are about as good
            share = min(sum(self._gains[1 : known + 1]) / sum(self._hoped[1 : known + 1]), 1.0)
            gains[known + 1 :] = [hoped * share**DOUBTED for hoped in self._hoped[known + 1 :]]
        for i in range(1, now + 1):
            gains[i] += DOUBT * self._fresh[i] * _deviation(self._means[i][:2]) / math.sqrt(self._tests[i])
        return [count - behind * _deviation(self._means[i][2:]) for i, count in enumerate(accumulate(gains))]

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
        rows = list[tuple[int, int, list[int]]]()  # last column with a guess, slots, guesses accepted of each width
        for (path, last), slots in Counter(zip(paths, lasts, strict=True)).items():
            accepted = [0] * len(self._widths)
            for column in range(1, path) if isinstance(path, int) else path:
                accepted[self._group_of[column]] += 1
            rows.append((last or asked, slots, list(accumulate(accepted))))
        for i, width in enumerate(self._widths[1:], 1):
            counts = [(slots, all_[i] - all_[i - 1], all_[i]) for last, slots, all_ in rows if last >= width - 1]
            if not counts:
                self._fresh[i] *= FADED
                continue
            tests, *sums = map(sum, zip(*[(s, s * n, s * n * n, s * m, s * m * m) for s, n, m in counts], strict=True))
            known = self._tests[i] if self._fresh[i] == 1.0 else min(self._tests[i], RECENT) * (self._fresh[i] or 1.0)
            share = max(1 - math.exp(-tests / RECENT), tests / (known + tests))
            self._recent[i] += (sums[0] / tests - self._recent[i]) * share
            far = CHANGED * _deviation(self._means[i][:2]) / math.sqrt(2 * RECENT)
            if abs(self._recent[i] - self._gains[i]) > max(far, LEAST_CHANGE):
                known, self._gains[i] = min(known, RECENT), self._recent[i]
            kept = known * math.exp(-tests / max(MEMORY, MEMORY_STEPS * tests))
            self._fresh[i], self._tests[i] = 1.0, kept + tests
            self._gains[i] = (kept * self._gains[i] + sums[0]) / self._tests[i]
            self._means[i] = [(kept * a + b) / self._tests[i] for a, b in zip(self._means[i], sums, strict=True)]


def _deviation(means: Sequence[float]) -> float:
    return math.sqrt(max(means[1] - means[0] ** 2, 0.0))


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

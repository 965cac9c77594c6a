"""What n-grams know of the next step: how many tokens its guesses are expected to commit, at each width.

Every lookup fills the whole window, and at every width the device reports which guess would have been right next. The
next windows are expected to be like those of the last result, since a match usually goes on; a slot without a match,
to have what slots had of late. A guess after a long match is right more often than one after a short match.

Slots differ, and one that guesses well makes the steps of the others slow. So the estimate is the geometric mean of the
slots' tokens, in which one slot that is twice as fast makes up for one that is half as fast, and for no more.
"""

import math
from bisect import bisect_right
from collections import Counter

from overlap_spec.features.ngram.messages import DividedLog
from overlap_spec.features.ngram.owners import Owners
from overlap_spec.messages import LookaheadRows, StepResult, TreePaths, find
from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.hooks import SchedulerHook
from overlap_spec.scheduler.prefix_cache import name_in
from overlap_spec.scheduler.requests import Request
from overlap_spec.scheduler.width import FixedWidth

CLASSES = (1, 2, 4, 8)  # tokens of the longest match: each class from here to the next; class 0 has none
FIRST_RATES, FIRST_TESTS = (0.0, 0.2, 0.4, 0.6, 0.8), 8.0  # of their right guesses, until as many tests outweigh them
MEMORY, MEMORY_STEPS = 128, 8  # tests after which an older one counts 1/e; those of so many steps where that is more
COLUMN_SHARE = 1 / 16  # of a right guess in the mean column of its level
LATE_SHARE = 1 / 8  # of the newest result in what slots had of late


def attach(parts: Parts) -> SchedulerHook | None:
    """Give the scheduler what it needs for methods that are self-drafting."""
    widths, limits = parts.planner.widths, parts.limits
    if limits.is_self_drafting and parts.settings.scheduler.keeps_width:
        widths.policy = MatchedWidth(limits.width)
    elif limits.is_self_drafting and limits.step_costs.widths:
        widths.tokens = MatchedTokens(limits.step_costs.widths)
    if find(limits.extensions, DividedLog) is None:
        return None
    limits.keeps_salts_apart = True
    return OwnedRequests(Owners())


class OwnedRequests(SchedulerHook):
    """Tells with each request that takes a slot whose it is."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    def started(self, request: Request) -> None:
        """The bands may be others than when it started before."""
        salt = request.admit.salt
        request.owner = self._owners.of(name_in(salt), salt)


class MatchedWidth(FixedWidth):
    """Explicit numbers: a whole window if some slot has a guess, else one column."""

    learns = True
    _matched = True

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        return super().choose(batch_size) if self._matched else 1

    def after_prompts(self, batch_size: int) -> int:
        return super().choose(batch_size)

    def observe(self, result: StepResult, asked: int = 0) -> None:
        found = find(result.extensions, LookaheadRows)
        self._matched = found is not None and any(level > 0 for level in found.levels)


class MatchedTokens:
    """The `TokenEstimate` of this module's docstring."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        self._widths = widths
        self._tests = [FIRST_TESTS] * len(FIRST_RATES)  # of each class
        self._right = [rate * FIRST_TESTS for rate in FIRST_RATES]
        self._columns = [float(column) for column in range(1, widths[-1])]  # of the right guess of each level
        self._late = [0.0] * len(widths)  # logs of the tokens of a slot, on average over the last results
        self._tokens = [1.0] * len(widths)

    def believed(self, now: int) -> list[float]:
        return self._tokens

    hoped = believed

    def observe(self, result: StepResult, asked: int = 0) -> None:
        found, trees = find(result.extensions, LookaheadRows), find(result.extensions, TreePaths)
        none = [0] * len(result.tokens)
        facts = (none, none, none) if found is None else (found.levels, found.strengths, found.next_columns)
        paths = [range(1, len(run)) for run in result.tokens] if trees is None else trees.paths
        windows, tests, right = Counter[tuple[int, int]](), Counter[int](), Counter[int]()  # by class
        for levels, strength, following, path in zip(*facts, paths, strict=True):
            if levels < 0:
                continue  # nothing was looked up
            kind = bisect_right(CLASSES, strength) if levels else 0
            columns = [*path, following] if following else path
            windows[kind, levels] += 1
            tests[kind] += min(len(path) + 1, levels)
            right[kind] += len(columns)
            for level, column in enumerate(columns):
                self._columns[level] += COLUMN_SHARE * (column - self._columns[level])
        for kind, count in tests.items():
            kept = math.exp(-count / max(MEMORY, MEMORY_STEPS * count))
            self._tests[kind] = kept * self._tests[kind] + count
            self._right[kind] = kept * self._right[kind] + right[kind]
        if windows:
            self._expect(windows)

    def _expect(self, windows: Counter[tuple[int, int]]) -> None:
        """Set the tokens by the slots' windows: class, and levels of guesses."""
        shares = [(self._logs(*window), slots / windows.total()) for window, slots in windows.items()]
        unmatched = windows[0, 0] / windows.total()
        for i, late in enumerate(self._late):
            log = sum([logs[i] * share for logs, share in shares])
            self._tokens[i] = math.exp(log + unmatched * late)
            self._late[i] += LATE_SHARE * (log - late)

    def _logs(self, kind: int, levels: int) -> list[float]:
        """Of the tokens of a slot with such a window, for each width."""
        reached, least, tokens = 1.0, 0, [1.0] * len(self._widths)
        for column in self._columns[:levels]:
            reached *= self._right[kind] / self._tests[kind]
            least = max(least + 1, round(column))  # a level is behind the one before it
            tokens = [count + reached * (least < width) for count, width in zip(tokens, self._widths, strict=True)]
        return list(map(math.log, tokens))

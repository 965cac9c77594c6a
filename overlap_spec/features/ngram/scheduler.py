"""What n-grams know of the next step: how many tokens its guesses are expected to commit, at each width.

Every lookup fills the whole window, and at every width the device reports which guess would have been right next. The
next windows are expected to be like those of the last result, since a match usually goes on; a slot without a match,
to have what slots had of late. A guess after a long match is right more often than one after a short match.

Slots differ, and one that guesses well makes the steps of the others slow. So the estimate is the geometric mean of the
slots' tokens, in which one slot that is twice as fast makes up for one that is half as fast, and for no more.

`Owners` knows whose a request is in the log of n-grams, and in which bands of the log it may write.
"""

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable

from overlap_spec.features.ngram import DividedLog
from overlap_spec.messages import GuessReport, Owner, StepResult, TreePaths, find
from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.hooks import SchedulerHook
from overlap_spec.scheduler.prefix_cache import name_in
from overlap_spec.scheduler.requests import Request
from overlap_spec.scheduler.width import WidthPolicy

CLASSES = (1, 2, 4, 8)  # tokens of the longest match: each class from here to the next; class 0 has none
FIRST_RATES, FIRST_TESTS = (0.0, 0.2, 0.4, 0.6, 0.8), 8.0  # of their right guesses, until as many tests outweigh them
MEMORY, MEMORY_STEPS = 128, 8  # tests after which an older one counts 1/e; those of so many steps where that is more
COLUMN_SHARE = 1 / 16  # of a right guess in the mean column of its level
LATE_SHARE = 1 / 8  # of the newest result in what slots had of late
BANDS = 16  # `overlap_spec_kernels.BANDS`
IDLE_S = 600.0
MOST_SALTS = 16384  # that are remembered, of all names


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


class Owners:
    """Numbers of salts and bands of names. `clock`: in seconds.

    An owner is a salt: requests of one salt find what others of the same salt have said. Its number is never given to
    another salt, so no two owners can be taken for one another. A salt that is forgotten gets a new number, and finds
    nothing of what was said before.

    The bands are shared among names (`name_in`), as pages of the prefix cache are: a client that makes up many salts,
    or floods the log, evicts its own entries. Names that start requests have equally many bands, or share them if there
    are more names than bands; those that have been idle for `IDLE_S` have none. Without names all requests may write
    everywhere.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_number = 0
        self._numbers: dict[str, dict[str, int]] = {}  # by name and salt, those used last at the end
        self._num_salts = 0
        self._bands: dict[str, list[int]] = {}  # of each name that has some
        self._heard: dict[str, float] = {}  # when each of them last started a request
        self._divided_at = -IDLE_S

    def of(self, name: str, salt: str) -> Owner | None:
        """The owner of a request that starts; None if it has no salt, and all bands."""
        now = self._clock()
        self._heard[name] = now
        if name not in self._bands or now - self._divided_at > IDLE_S:
            self._divide(now)
        bands = self._bands[name]
        return Owner(self._number_of(name, salt), packed(bands)) if salt or len(bands) < BANDS else None

    def _number_of(self, name: str, salt: str) -> int:
        if not salt:
            return 0
        salts = self._numbers.setdefault(name, {})
        number = salts.pop(salt, 0)
        if not number:
            self._last_number = number = self._last_number + 1
            self._num_salts += 1
        salts[salt] = number
        if self._num_salts > MOST_SALTS:
            self._forget_one()
        return number

    def _forget_one(self) -> None:
        """The salt that was used least recently, of the name that has most."""
        name = max(self._numbers, key=lambda each: len(self._numbers[each]))
        salts = self._numbers[name]
        del salts[next(iter(salts))]
        self._num_salts -= 1
        if not salts:
            del self._numbers[name]

    def _divide(self, now: float) -> None:
        """Give names that are not idle equally many bands. A name keeps those that it has, as far as it may."""
        self._divided_at = now
        self._heard = {name: at for name, at in self._heard.items() if now - at <= IDLE_S}
        before = self._bands
        names = sorted(self._heard, key=lambda name: -len(before.get(name, ())))
        least, more = divmod(BANDS, len(names))
        numbers = {name: max(least + (i < more), 1) for i, name in enumerate(names)}
        users: Counter[int] = Counter()
        self._bands = {}
        for name in names:
            self._bands[name] = [band for band in before.get(name, ()) if not users[band]][: numbers[name]]
            users.update(self._bands[name])
        for name, bands in self._bands.items():
            while len(bands) < numbers[name]:
                bands.append(min(range(BANDS), key=lambda band: users[band]))
                users[bands[-1]] += 1


def packed(bands: list[int]) -> int:
    """The bands of a slot in the form of `NgramLog.bands`: sixteen numbers of 4 bits in an int64.

    Number i is where the slot looks for what a name with all bands has written to band i: band i itself if it is one of
    the slot's.
    """
    numbers = [band if band in bands else bands[band % len(bands)] for band in range(BANDS)]
    together = sum(number << 4 * i for i, number in enumerate(numbers))
    return together - (together >> 63 << 64)


class OwnedRequests(SchedulerHook):
    """Tells with each request that takes a slot whose it is."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    def started(self, request: Request) -> None:
        """The bands may be others than when it started before."""
        salt = request.admit.salt
        request.owner = self._owners.of(name_in(salt), salt)


class MatchedWidth(WidthPolicy):
    """Explicit numbers: a whole window if some slot has a guess, else one column."""

    learns = True
    _matched = True

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        return super().choose(batch_size) if self._matched else 1

    def after_prompts(self, batch_size: int) -> int:
        return super().choose(batch_size)

    def observe(self, result: StepResult, asked: int = 0, share: float = 1.0) -> None:
        found = find(result.extensions, GuessReport)
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

    def believed(self, now: int, behind: float = 0.0) -> list[float]:
        return self._tokens

    hoped = believed

    def observe(self, result: StepResult, asked: int = 0, share: float = 1.0) -> None:
        found, trees = find(result.extensions, GuessReport), find(result.extensions, TreePaths)
        facts = [[0] * len(result.tokens)] * 3 if found is None else [found.levels, found.strengths, found.next_columns]
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
        logs, num_slots = [0.0] * len(self._widths), windows.total()  # logs: of each width, summed over the slots
        for (kind, levels), slots in windows.items():
            reached, least, tokens = 1.0, 0, [1.0] * len(self._widths)
            for column in self._columns[:levels]:
                reached *= self._right[kind] / self._tests[kind]
                least = max(least + 1, round(column))  # a level is behind the one before it
                tokens = [count + reached * (least < width) for count, width in zip(tokens, self._widths, strict=True)]
            logs = [log + slots * math.log(count) for log, count in zip(logs, tokens, strict=True)]
        for i, late in enumerate(self._late):
            self._tokens[i] = math.exp((logs[i] + windows[0, 0] * late) / num_slots)
            self._late[i] += LATE_SHARE * (logs[i] / num_slots - late)

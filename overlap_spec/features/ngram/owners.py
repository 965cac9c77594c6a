"""Whose a request is in the log of n-grams, and in which bands of the log it may write.

An owner is a salt: requests of one salt find what others of the same salt have said. Its number is never given to
another salt, so no two owners can be taken for one another. A salt that is forgotten gets a new number, and finds
nothing of what was said before.

The bands are shared among names (`name_in`), as pages of the prefix cache are: a client that makes up many salts, or
floods the log, evicts its own entries. Names that start requests have equally many bands, or share them if there are
more names than bands; those that have been idle for `IDLE_S` have none. Without names all requests may write
everywhere.
"""

import time
from collections import Counter
from collections.abc import Callable

from overlap_spec.messages import Owner

BANDS = 16  # `overlap_spec_kernels.BANDS`
IDLE_S = 600.0
MOST_SALTS = 16384  # that are remembered, of all names


class Owners:
    """Numbers of salts and bands of names. `clock`: in seconds."""

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

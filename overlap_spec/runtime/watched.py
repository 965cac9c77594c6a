"""Records what the processes of an engine did in the last seconds, while it is watched.

    watch --LivenessProbe(watch_s)--> actor: it records for so long --Alive(records)--> WatchedRecords

The probe is the one that asks for heartbeats; nothing is added to what steps send. A question that is not answered
yet is not asked again, so a process that hangs collects none.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

from overlap_spec.messages import Record

WATCH_S = 5.0  # for which a process records after a question
KEPT_S = 4.0
MOST_KEPT = 20_000
BETWEEN_S = 0.25  # questions, however many people watch
GIVEN_UP_S = 5.0  # a question that has no answer for so long: its process has ended, say


class WatchedRecords:
    """The newest records of all processes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: deque[Record] = deque(maxlen=MOST_KEPT)
        self._asked: dict[str, float] = {}  # by actor: when, of questions without an answer
        self._asked_at = -BETWEEN_S

    def to_ask(self, actors: Iterable[str]) -> list[str]:
        """Those to be asked now; they count as asked."""
        now = self._clock()
        if now - self._asked_at < BETWEEN_S:
            return []
        self._asked_at = now
        due = [actor for actor in actors if now - self._asked.get(actor, -GIVEN_UP_S) >= GIVEN_UP_S]
        self._asked.update(dict.fromkeys(due, now))
        return due

    def add(self, actor: str, records: Iterable[Record]) -> None:
        """Take an answer."""
        self._asked.pop(actor, None)
        self._records.extend(records)

    def newest(self) -> list[Record]:
        """Those of the last seconds, by their begin."""
        since = self._clock() - KEPT_S
        kept = [record for record in self._records if record.end >= since]
        self._records = deque(kept, maxlen=MOST_KEPT)
        return sorted(kept, key=lambda record: (record.begin, -record.end))

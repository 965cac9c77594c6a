"""How often dead actors are started again, and the recovery that is under way."""

import logging
import time
from collections import deque
from collections.abc import Callable

from overlap_spec.config import RecoverySettings
from overlap_spec.errors import ActorDied

log = logging.getLogger(__name__)


class RecoveryLimit:
    """At most `settings.most` recoveries within `settings.window_s`; none before the engine was ready."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = RecoverySettings()  # off, until the engine is ready
        self.cause: ActorDied | None = None  # of the recovery that is under way
        self.died_at = 0.0  # when that was; monotonic, in seconds
        self._clock = clock
        self._begun: deque[float] = deque()

    def begin(self, error: ActorDied) -> bool:
        """Begin a recovery, or begin again one that has met another death. False: the run is to end."""
        settings, now = self.settings, self._clock()
        while self._begun and now - self._begun[0] > settings.window_s:
            self._begun.popleft()
        if not settings.enabled:
            return False
        minutes = settings.window_s / 60
        if len(self._begun) >= settings.most:
            log.error("the engine has recovered %d times in %.0f minutes, which is the limit", settings.most, minutes)
            return False
        self._begun.append(now)
        if self.cause is None:
            self.died_at = now
        self.cause = error
        count = len(self._begun), settings.most, minutes
        what = "all processes" if error.actor == "tokenizer" else "scheduler and worker"
        log.error("%s; %s are started again (%d of %d times in %.0f minutes)", error, what, *count)
        return True

    def end(self) -> None:
        """The recovery is over."""
        self.cause = None

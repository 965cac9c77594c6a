"""How long the phases of a process's start take, one after another: what the start-up table and reports show."""

import os
import time
from pathlib import Path

_OWN_STATE = Path("/proc/self/stat")
_STARTED = 19  # the field with the process's start, counted from the one behind its name: ticks since the boot


class StartTimes:
    """Seconds by phase. The first phase begins with the process itself, so that interpreter and imports count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = time.monotonic() - process_age()

    @property
    def total(self) -> float:
        """Seconds of all phases that have ended."""
        return sum(self.seconds.values())

    def end(self, phase: str) -> None:
        """Say what the time since the last call, or since the process began, was spent on."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._begun
        self._begun = now


def process_age() -> float:
    """Seconds since this process was started; 0 where the kernel does not say."""
    try:
        started = int(_OWN_STATE.read_text().rpartition(")")[2].split()[_STARTED])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return max(age, 0.0)

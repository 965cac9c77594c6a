"""One line on stderr that shows how a run of traffic goes; without a terminal, a line every few seconds."""

import statistics
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from overlap_spec.bench.traffic.processes import Running

COLUMNS = 80
EVERY_S = 5.0  # between two lines where there is no terminal
NEWEST = 1000  # first tokens that the line's percentiles are of


class LiveLine:
    """Shows the newest report. `say`: where lines go if there is no terminal."""

    def __init__(self, say: Callable[[str], object]) -> None:
        console = Console(stderr=True)
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self._say = say
        self._said_at = 0.0
        self._what = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, what: str, running: Running) -> None:
        if self._live is not None:
            self._live.update(Text(line_of(what, running), no_wrap=True), refresh=True)
        elif what != self._what or time.monotonic() - self._said_at > EVERY_S:
            self._what, self._said_at = what, time.monotonic()
            self._say(line_of(what, running))


def line_of(what: str, running: Running) -> str:
    """Progress, rates, first tokens (median and 99th percentile of the newest) and the longest gap, in 80 columns."""
    seconds = max(running.elapsed_s, 1e-3)
    ended, failed = running.total("ended"), running.total("failed")
    parts = [
        f"{what} {seconds:.0f} s",
        f"{ended}/{running.planned}" + (f" ({failed} failed)" if failed else ""),
        f"{ended / seconds:.1f} req/s",
        f"{running.total('tokens') / seconds:,.0f} tok/s",
    ]
    if newest := [1000 * each for each in running.first_tokens[-NEWEST:]]:
        slow = statistics.quantiles(newest, n=100, method="inclusive")[-1] if len(newest) > 1 else newest[0]
        parts.append(f"first {statistics.median(newest):.0f}/{slow:.0f} ms")
        parts.append(f"gap {1000 * running.longest_gap:.0f}")
    return "  ".join(parts)[:COLUMNS]

"""`overlap-spec top`: what a running server does, in a terminal, every few seconds.

Without --url it finds the server on this machine, by the address that each leaves in its run directory. All figures
come from `/health` and `/metrics`, so it costs a server what a scrape costs.
"""

import argparse
import contextlib
import sys
import time
from collections import deque

import msgspec
from rich.console import Console
from rich.live import Live

from overlap_spec.config import EngineConfig
from overlap_spec.config.keys import read_keys
from overlap_spec.entrypoints.top.figures import Answer, Figures, Scraper, figures_of
from overlap_spec.entrypoints.top.table import shown
from overlap_spec.errors import OverlapSpecError
from overlap_spec.runtime.run_directory import announced

WINDOW_S = 30.0  # that rates and percentiles are of
LEAST_INTERVAL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--url", metavar="URL", help="of the server; default: the one on this machine")
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="as serve has it; the key may also be in the environment"
    )
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=2.0, help="between two looks (default: 2)")
    parser.add_argument("--once", action="store_true", help="print one table and end; so does an output to no terminal")
    parser.add_argument("--json", action="store_true", help="JSON, one object a look, in place of tables")


def run(arguments: argparse.Namespace) -> int:
    """Show figures until Ctrl-C, or once. Returns the exit status. Raises: OverlapSpecError if no server answers."""
    console = Console()
    keys = read_keys(EngineConfig(api_key_file=arguments.api_key_file))
    watch = Watch(Scraper((arguments.url or local_url()).rstrip("/"), keys.first))
    figures = watch.look()
    if arguments.once or not (arguments.json or console.is_terminal):
        _print(figures, arguments.json, console)
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _follow(watch, figures, max(arguments.interval, LEAST_INTERVAL_S), console, arguments.json)
    return 0


def local_url() -> str:
    """The address of the one server on this machine. Raises: OverlapSpecError if there is none, or several."""
    found = announced()
    if not found:
        raise OverlapSpecError("no server of this user is running on this machine (with this TMPDIR): give --url")
    if len(found) > 1:
        raise OverlapSpecError(f"{len(found)} servers are running: give --url with one of {', '.join(found)}")
    return found[0]


class Watch:
    """Looks at one server. Rates and percentiles are of the last looks; of the first one, of all since the start."""

    def __init__(self, scraper: Scraper) -> None:
        self._scraper = scraper
        self._looks: deque[Answer] = deque()

    def look(self) -> Figures:
        """The newest figures. Raises: OverlapSpecError if the server does not answer."""
        answer = self._scraper.ask()
        if self._looks and answer.is_of_another_start(self._looks[-1]):
            self._looks.clear()
        while len(self._looks) > 1 and answer.at - self._looks[0].at > WINDOW_S:
            self._looks.popleft()
        figures = figures_of(answer, self._looks[0] if self._looks else None)
        if answer.has_metrics:
            self._looks.append(answer)
        return figures


def _follow(watch: Watch, figures: Figures, interval_s: float, console: Console, as_json: bool) -> None:
    """Look again and again. A server that has stopped answering may come back: its last figures stay."""
    if as_json:
        while True:
            _print(figures, as_json, console)
            time.sleep(interval_s)
            figures = watch.look()
    with Live(shown(figures, console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                figures = watch.look()
            except OverlapSpecError as error:
                figures = msgspec.structs.replace(figures, state="no answer", reason=str(error))
            live.update(shown(figures, console.width), refresh=True)


def _print(figures: Figures, as_json: bool, console: Console) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
        sys.stdout.flush()
    else:
        console.print(shown(figures, console.width))

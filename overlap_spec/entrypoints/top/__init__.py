"""`overlap-spec top`: what a running server does, in a terminal, every few seconds.

Without --url it finds the server on this machine, by the address that each leaves in its run directory. All figures
come from `/health` and `/metrics`, so it costs a server what a scrape costs.
"""

import argparse
import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from overlap_spec.config import MIB, EngineConfig
from overlap_spec.config.keys import read_keys
from overlap_spec.entrypoints.top.figures import Answer, Figures, Percentiles, Scraper, figures_of
from overlap_spec.errors import ConfigError, OverlapSpecError
from overlap_spec.messages import DraftState, EngineState
from overlap_spec.runtime.run_directory import announced

WINDOW_S = 30.0  # that rates and percentiles are of
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.2, 86400
NARROWEST = 38  # columns of a terminal that a table takes at least
GOOD, BAD, WARN, QUIET = "green", "bold red", "yellow", "dim"
NONE = "-"

Row = tuple[str, str | Text]


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
    if not arguments.interval <= MOST_INTERVAL_S:
        raise ConfigError("interval", f"must be seconds, at most {MOST_INTERVAL_S}, got {arguments.interval}")
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


def shown(figures: Figures, width: int) -> RenderableType:
    """Everything, for a terminal of so many columns."""
    parts = list(_parts(figures)) if figures.has_metrics else [("processes", _heartbeats(figures))]
    sides: list[list[RenderableType]] = [[] for _ in range(max(1, min(len(parts), width // NARROWEST)))]
    heights = [0] * len(sides)
    for title, rows in parts:  # the next one goes where there is the most room
        lines, side = list(rows), heights.index(min(heights))
        sides[side].append(_block(title, lines))
        heights[side] += len(lines) + 1
    grid = Table.grid(expand=True, padding=(0, 2))
    for _ in sides:
        grid.add_column(ratio=1)
    grid.add_row(*(Group(*side) for side in sides))
    return Group(*_head(figures), grid)


def _head(figures: Figures) -> Iterator[Text]:
    """The server and its state."""
    state = f"{figures.state} for {duration(figures.since_s)}"
    ranks = f"{figures.ranks} ranks" if figures.ranks > 1 else ""
    parts = [f"overlap-spec {figures.version}".rstrip(), figures.url, figures.model, figures.method, ranks]
    yield Text("  ".join([part for part in parts if part]), style="bold")
    yield Text(state, style=GOOD if figures.state == EngineState.READY else BAD)
    if figures.reason:
        yield Text(figures.reason)


def _parts(figures: Figures) -> Iterator[tuple[str, Iterator[Row]]]:
    window = "since the start" if figures.window_s is None else f"last {figures.window_s:.0f} s"
    yield "tokens", _tokens(figures)
    yield f"p50 / p90 / p99, {window}", _latency(figures)
    yield "speculation", _speculation(figures)
    yield "requests", _requests(figures)
    yield "KV pool", _pool(figures)
    yield "a step", _step(figures)
    yield "processes", _processes(figures)


def _tokens(figures: Figures) -> Iterator[Row]:
    yield "generated a second", number(figures.tokens_per_s)
    yield "of prompts a second", number(figures.prompt_tokens_per_s)
    yield "prefix hits", percent(figures.prefix_hits)


def _latency(figures: Figures) -> Iterator[Row]:
    yield "first token", three(figures.first_token_s)
    yield "between tokens", three(figures.inter_token_s)
    yield "whole request", three(figures.request_s)


def _speculation(figures: Figures) -> Iterator[Row]:
    yield "accept length", number(figures.accept_length, 2)
    for name, each in figures.classes.items():
        text = f"{each.accept_length:.2f}, usually {each.usual_accept_length:.2f}"
        yield f"  {name}", Text(text, style=BAD if each.has_collapsed else "")
    yield "guesses accepted", percent(figures.accept_rate)
    yield "step width", f"{number(figures.step_width)}, {number(figures.num_steps)} in a row"
    yield "draft", Text(figures.draft, style=BAD if figures.draft in (DraftState.DEAD, DraftState.COLLAPSED) else "")
    if figures.adapt_versions is not None:
        yield "  learnt versions", f"{number(figures.adapt_versions)}, last gain {percent(figures.adapt_gain)}"


def _requests(figures: Figures) -> Iterator[Row]:
    yield "running", f"{number(figures.num_running)} of {number(figures.num_slots)}"
    waiting = f"{number(figures.num_queued)} of {number(figures.most_queued)}"
    yield "waiting", Text(waiting, style=WARN if figures.num_queued else "")
    yield "received", number(figures.num_requests)
    yield "ended early", number(figures.num_aborted)
    yield "preempted", number(figures.num_preempted)
    for status, count in figures.refused.items():
        yield f"answered {status}", number(count)


def _pool(figures: Figures) -> Iterator[Row]:
    usage = figures.token_usage
    yield "in use", Text(percent(usage), style=WARN if usage is not None and usage > 0.95 else "")
    yield "tokens in use", number(figures.kv_used_tokens)
    yield "prefix cache alone", number(figures.kv_evictable_tokens)
    yield "size", number(figures.kv_pool_tokens)
    if figures.most_snapshot_bytes is not None:
        held, most = (number((each or 0) / MIB) for each in (figures.snapshot_bytes, figures.most_snapshot_bytes))
        yield "snapshots", f"{held} of {most} MiB"
        hits = figures.snapshot_hits / figures.snapshot_lookups if figures.snapshot_lookups else None
        yield "  hit rate", percent(hits)


def _step(figures: Figures) -> Iterator[Row]:
    yield "device works", duration(figures.step_time_s)
    yield "device waits", duration(figures.gpu_gap_s)
    yield "host", duration(figures.host_time_s)
    yield "  of that hidden", duration(figures.host_time_hidden_s)
    yield "efficiency", percent(figures.step_efficiency)
    if figures.num_experts is not None:
        yield "experts read", f"{number(figures.experts_read, 1)} of {number(figures.num_experts)}"


def _heartbeats(figures: Figures) -> Iterator[Row]:
    for process, seconds in figures.last_sign_s.items():
        yield process, Text(f"{duration(seconds)} ago", style=BAD if process == figures.actor else "")


def _processes(figures: Figures) -> Iterator[Row]:
    yield from _heartbeats(figures)
    took = f", last took {duration(figures.last_recovery_s)}" if figures.recoveries else ""
    yield "recoveries", Text(number(figures.recoveries) + took, style=WARN if figures.recoveries else "")
    yield "audited tokens", number(figures.audit_tokens)
    yield "  near-ties", number(figures.audit_near_ties)
    yield "  faults", Text(number(figures.audit_faults), style=BAD if figures.audit_faults else "")


def _block(title: str, rows: list[Row]) -> RenderableType:
    """A titled line, and a line for each figure."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True, style=QUIET)
    grid.add_column(ratio=1, justify="right", overflow="fold")
    for name, value in rows:
        grid.add_row(name, value)
    return Group(Rule(title, align="left", style=QUIET), grid)


def number(value: float | None, digits: int = 0) -> str:
    """With separators."""
    return NONE if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Of a share."""
    return NONE if value is None else f"{100 * value:.1f}%"


def duration(seconds: float | None) -> str:
    """In a unit that suits it."""
    if seconds is None:
        return NONE
    if seconds >= 60:
        return f"{seconds / 60:,.0f} min"
    return f"{_digits(seconds)} s" if seconds >= 1 else f"{_digits(1000 * seconds)} ms"


def three(latency: Percentiles) -> str:
    """Three percentiles in one unit."""
    if latency.p50 is None or latency.p90 is None or latency.p99 is None:
        return NONE
    scale, unit = (1.0, "s") if latency.p99 >= 1 else (1000.0, "ms")
    return " / ".join(_digits(scale * each) for each in (latency.p50, latency.p90, latency.p99)) + f" {unit}"


def _digits(value: float) -> str:
    """Three of them, or all before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"

"""Progress on stderr while a model is fetched and loaded."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from overlap_spec.runtime.supervisor import Progress as Report


class ProgressBars:
    """One bar per thing that is reported; a total of 0 means unknown, and the bar pulses. Any thread may report."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=None)
        self._progress.update(self._tasks[what], completed=done, total=total or None)


class ProgressLines:
    """One line per thing that is reported, where there is no terminal to draw in."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._seen: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._seen:
            self._seen.add(what)
            self._say(what)


@contextlib.contextmanager
def shown_progress(say: Callable[[str], object]) -> Iterator[Report]:
    """Draw bars inside the block and wipe them at its end; without a terminal, `say` each line."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(say)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield ProgressBars(progress)

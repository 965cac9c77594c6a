"""Progress of a download or a check."""

import io
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

Progress = Callable[[str, int, int], None]  # what, done, total; 0: the total is unknown


def ignore_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""


def reporting_tqdm(what: str, progress: Progress) -> type[Any]:
    """A tqdm that calls `progress` instead of drawing, for libraries that only support tqdm."""

    class ReportingTqdm(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.total:
                progress(f"{what}: {self.desc.rstrip(': ')}" if self.desc else what, int(self.n), int(self.total))

        def clear(self, nolock: bool = False) -> None:
            return

    return ReportingTqdm

"""What a step is laid out for, and its launch."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from overlap_spec.worker.chunks import PromptShape
from overlap_spec.worker.handle import StepHandle


class StepShape(NamedTuple):
    """What a step is laid out for: exactly for what it has, or for more, as what holds it was captured."""

    slots: int  # with a window; 0: it has prompts alone
    width: int  # of the windows, or of those that prompts propose; 0: the draft catches up, and no layers run
    columns: int  # of the windows' page tables
    prompts: PromptShape | None = None
    placed: bool = False  # windows are put at given places first, and nothing is proposed

    @property
    def has_both(self) -> bool:
        """Whether there are windows and prompts."""
        return self.slots > 0 and self.prompts is not None

    @property
    def prompt_rows(self) -> int:
        """Rows of prompts."""
        return 0 if self.prompts is None else self.prompts.rows


class Launch:
    """A step that is being launched; `handles` are of its parts, in order. Call `advance` until it returns True."""

    def __init__(self, mode: torch.inference_mode, waits: Iterator[Callable[[], bool]], *handles: StepHandle) -> None:
        self._mode = mode
        self.handle = handles[0]
        self.handles = handles
        self._waits = waits
        self._wait: Callable[[], bool] | None = None
        self._since = 0.0

    def advance(self) -> bool:
        """Enqueue as much as can be. Returns whether all of it is. Sync: never. Raises: what the step raises."""
        if self._wait is not None and not self._wait():
            return False
        if self._wait is not None:
            self.handle.host.waited += time.monotonic() - self._since
        with self._mode:
            for wait in self._waits:
                if not wait():
                    self._wait, self._since = wait, time.monotonic()
                    return False
        return True

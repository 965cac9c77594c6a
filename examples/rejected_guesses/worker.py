"""A feature of one's own: it logs every guess that the target rejected, and the token that was drawn instead.

    PYTHONPATH=examples overlap-spec serve --feature rejected_guesses

A package with a `worker.py` attaches to the process that owns the device. Before the layers of a step run, the windows
of all slots are copied to the host, beside the device's work. When the step's tokens are there too, a slot that
committed k + 1 tokens has accepted k guesses: the next one in its window, if there is one, was rejected.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence

from overlap_spec.messages import Extension
from overlap_spec.worker.build import Parts
from overlap_spec.worker.devices import Download
from overlap_spec.worker.hooks import StepHook, Wait
from overlap_spec.worker.step import StepHandle

log = logging.getLogger(__name__)


def attach(parts: Parts) -> StepHook | None:
    """Of chains; a tree has several guesses for one position."""
    return RejectedGuesses(parts) if parts.method.tree is None and parts.slots.width > 1 else None


class RejectedGuesses(StepHook):
    """Looks at every step that verifies guesses."""

    def __init__(self, parts: Parts) -> None:
        self._slots, self._device = parts.slots, parts.device
        self._windows: Download | None = None  # of the step that is being launched
        self._steps: deque[tuple[StepHandle, Download]] = deque()  # that are launched, and not logged

    def before_layers(self, handle: StepHandle) -> Iterable[Wait]:
        """Copy the windows out while they are what this step verifies."""
        is_trial = handle.plan.step_id == 0  # the worker times steps before it is ready
        verifies = handle.plan.slots and handle.plan.width > 1 and not is_trial
        self._windows = self._device.download(self._slots.window.clone()) if verifies else None
        return ()

    def published(self, handle: StepHandle) -> None:
        """The step's tokens are on their way."""
        if self._windows is not None and handle.plan.slots:
            self._steps.append((handle, self._windows))

    def replies(self) -> Sequence[Extension]:
        """Log the steps whose tokens have come. The scheduler is told nothing."""
        while self._steps and self._steps[0][0].ready() and self._steps[0][1].ready():
            handle, download = self._steps.popleft()
            windows = download.rows()
            for slot, tokens in zip(handle.plan.slots, handle.tokens(), strict=True):
                guesses = windows[slot][1 : handle.plan.width]
                if tokens and guesses[len(tokens) - 1 : len(tokens)] not in ([], [-1]):
                    rejected = guesses[len(tokens) - 1]
                    log.info("step %d: %d rejected, %d drawn", handle.plan.step_id, rejected, tokens[-1])
        return ()

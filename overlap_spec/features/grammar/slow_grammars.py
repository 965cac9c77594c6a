"""Grammars that take too long for the worker's loop: they are followed in threads, and steps do not wait for them.

A mask takes some 5 to 50 microseconds, and seldom milliseconds. So grammars are followed in the loop. One that took
longer is slow until one of its windows was quick again. A step goes on without a slow slot whose masks are late; the
slot takes part again when they are there, with the same window:

    layers of step N       [ A  all slots ]                    [ A  all slots ]
    judge, draft                           [ B C  without s ]                  [ B C  all slots ]
    masks of slot s                [ .................................... ]
"""

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from overlap_spec.features.grammar.grammars import Grammars, RequestGrammar
from overlap_spec.features.grammar.window_masks import HostWindow
from overlap_spec.worker.devices import DeviceEvent

Result = TypeVar("Result")
Wait = Callable[[], bool]

SLOW_S = 2e-3  # for one thread's work
TIMEOUT_S = 0.5e-3  # of a step when its layers are through, for masks that are late for the first time
EMPTY_TIMEOUT_S = 5e-3  # of a step whose slots are all late: it is launched in vain, and lets new requests in
LOOK_S = 50e-6  # how long a look at threads lets them run: one gets Python's lock from a polling loop only after ms


@dataclass
class Filling:
    """The masks of one window: of a slot that has not taken part in a step with them."""

    masks: Future[Tensor]
    width: int
    was_late: bool = False


class SlowGrammars:
    """Follows grammars in threads, each in one at a time."""

    def __init__(self, grammars: Grammars) -> None:
        self.slow_s = SLOW_S
        self.timeout_s = TIMEOUT_S
        self.is_patient = False  # no slot is ever late
        self._grammars = grammars
        self._tasks: dict[int, Future[Any]] = {}  # by uid: the last one, through or not
        self._fillings: dict[int, Filling] = {}  # by uid

    def note_time(self, grammars: Sequence[RequestGrammar], seconds: float) -> None:
        """The loop followed these at once."""
        self._grammars.memory.spend(seconds)
        for grammar in grammars:
            grammar.seconds += seconds / len(grammars)
        shares = -(-len(grammars) // self._grammars.window_masks.num_threads)
        if seconds > self.slow_s * shares:
            for grammar in grammars:
                grammar.is_slow = True

    def advance(self, uid: int, tokens: Sequence[int]) -> None:
        """Let a grammar consume committed tokens."""
        grammar = self._grammars.of(uid)

        def advance() -> None:
            begun = time.perf_counter()
            grammar.advance(tokens)
            self._spent(grammar, time.perf_counter() - begun)

        self._run(uid, advance)

    def fill(self, uid: int, window: HostWindow) -> None:
        """Begin to compute a window's masks."""
        grammar, memory = self._grammars.of(uid), self._grammars.window_masks.memory(len(window.tokens))

        def masks() -> Tensor:
            begun = time.perf_counter()
            self._grammars.masks([grammar], [window], memory, [0])
            seconds = time.perf_counter() - begun
            grammar.is_slow = seconds > self.slow_s
            self._spent(grammar, seconds)
            return memory

        self._fillings[uid] = Filling(self._run(uid, masks), len(window.tokens))

    def filling(self, uid: int, width: int) -> Filling | None:
        """The masks of the slot's window, if its first `width` columns have or get any."""
        found = self._fillings.get(uid)
        return found if found is not None and found.width >= width else None

    def is_busy(self, uid: int) -> bool:
        """Whether a thread has the request's grammar."""
        task = self._tasks.get(uid)
        return task is not None and not task.done()

    def idle(self, uids: Sequence[int]) -> Wait:
        """A wait until no thread has any of these."""
        tasks = [self._tasks[uid] for uid in uids if uid in self._tasks]
        return lambda: are_done(tasks)

    def judged(self, uid: int) -> None:
        """The slot has taken part in a step: its next window is another."""
        self._fillings.pop(uid, None)

    def forget(self, uid: int) -> None:
        """The request is gone."""
        self._fillings.pop(uid, None)
        self._tasks.pop(uid, None)

    def late(
        self, fillings: Sequence[Filling], layers: DeviceEvent, has_others: bool
    ) -> Generator[Wait, None, list[bool]]:
        """Wait as long as it pays. Returns which are late.

        `layers`: when the step's layers are through. `has_others`: the step has slots that need not wait.
        """
        tasks = [filling.masks for filling in fillings]
        if self.is_patient:
            yield lambda: are_done(tasks)
        elif has_others:
            yield self._until_late(fillings, layers)
        else:
            yield _until_any(tasks)
        found = [not task.done() for task in tasks]
        for filling, is_late in zip(fillings, found, strict=True):
            filling.was_late |= is_late
        return found

    def _spent(self, grammar: RequestGrammar, seconds: float) -> None:
        grammar.seconds += seconds
        self._grammars.memory.spend(seconds)

    def _until_late(self, fillings: Sequence[Filling], layers: DeviceEvent) -> Wait:
        timeout_s = 0.0 if any(filling.was_late for filling in fillings) else self.timeout_s
        tasks, since = [filling.masks for filling in fillings], 0.0

        def is_over() -> bool:
            nonlocal since
            if are_done(tasks):
                return True
            if not since and layers.passed():
                since = time.monotonic()
            return since > 0 and time.monotonic() - since >= timeout_s

        return is_over

    def _run(self, uid: int, work: Callable[[], Result]) -> Future[Result]:
        before = self._tasks.get(uid)

        def task() -> Result:
            if before is not None:
                before.result()  # it has begun: tasks begin in their order
            return work()

        future = self._grammars.run(task)
        self._tasks[uid] = future
        return future


def are_done(tasks: Sequence[Future[Any]]) -> bool:
    """Whether threads are through; lets them run for a while if they are not."""
    return all(task.done() for task in tasks) or not wait(tasks, LOOK_S).not_done


def _until_any(tasks: Sequence[Future[Any]]) -> Wait:
    """A wait until a thread is through, or too much time is."""
    end = time.monotonic() + EMPTY_TIMEOUT_S
    return lambda: bool(wait(tasks, LOOK_S, FIRST_COMPLETED).done) or time.monotonic() >= end

"""One step's masks: what a step with grammars waits for, and what it uploads.

    host   | tokens of step N | forced tokens |           | window of N + 1 | masks ............. |
    device | .. C of step N ..                | forced, A of step N + 1 ........................ | B, masked | C

Only the launch of this step waits; the worker's loop goes on. Every wait is a function that tells whether it is over.

Few grammars are followed by the loop itself, one between two looks at everything else: a mask takes some 10 to 100
microseconds, and a thread gets Python's lock from a polling loop only after milliseconds. More grammars are followed in
threads, and the loop lets go of the lock while it waits for them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from overlap_spec_kernels import place_forced
from torch import Tensor

from overlap_spec.messages import GrammarFailed, StepPlan
from overlap_spec.sampling.masks import TokenMasks
from overlap_spec.spec.interfaces import Tree
from overlap_spec.worker.chunks import Packer
from overlap_spec.worker.devices import Device, Download
from overlap_spec.worker.grammars import Grammars, RequestGrammar
from overlap_spec.worker.handle import StepHandle
from overlap_spec.worker.slots import SlotRows

Wait = Callable[[], bool]

FEW = 8  # grammars that the loop follows itself
LOOK_S = 50e-6  # how long a look at threads lets them run


@dataclass(frozen=True)
class Constrained:
    """A slot of a step whose request has a grammar."""

    row: int  # in the plan
    slot: int
    uid: int
    grammar: RequestGrammar


class Masking:
    """Follows the grammars of slots from step to step. `proposes`: what must follow is put into windows."""

    def __init__(self, grammars: Grammars, slots: SlotRows, device: Device, tree: Tree | None, proposes: bool) -> None:
        assert slots.processors.masks is not None
        self.grammars = grammars
        self._masks: TokenMasks = slots.processors.masks
        self._slots = slots
        self._device = device
        self._max_forced = (slots.width - 1 if tree is None else tree.num_levels) if proposes else 0
        self._parents = None if tree is None else slots.parents
        self._uids: dict[int, int] = {}  # of slots with a grammar
        self._unread: deque[tuple[StepHandle, list[Constrained]]] = deque()  # tokens that are not on the host yet
        self._advancing: list[Future[None]] = []
        self._uploaded: tuple[list[int], Tensor] = [], torch.empty(0)  # slots of the last step that had grammars
        self._window: Download
        self._failed: list[GrammarFailed] = []  # which the scheduler is to be told before the results that follow

    def owners(self, plan: StepPlan) -> tuple[list[Constrained], list[int]]:
        """The step's slots with a grammar, and slots whose grammar is gone with its request; notes new owners."""
        found, cleared = [], []
        for row, work in enumerate(plan.work):
            if work.reset is not None:
                if self._uids.pop(work.slot, 0) and not work.reset.grammar:
                    cleared.append(work.slot)
                if work.reset.grammar:
                    self._uids[work.slot] = work.reset.grammar
                    if plan.audit:
                        self.grammars.restart(work.reset.grammar)
            if uid := self._uids.get(work.slot, 0):
                found.append(Constrained(row, work.slot, uid, self.grammars.of(uid)))
        return found, cleared

    def launched(self, handle: StepHandle, constrained: list[Constrained]) -> None:
        """The step's tokens are on their way."""
        if constrained:
            self._unread.append((handle, constrained))
            self.read_tokens()

    def read_tokens(self) -> None:
        """Let grammars consume the tokens that have come. Sync: never."""
        while self._unread and self._unread[0][0].ready():
            handle, constrained = self._unread.popleft()
            tokens = handle.tokens()
            for each in constrained:
                advance = _advance(each.grammar, tokens[each.row])
                if len(constrained) > FEW:
                    self._advancing.append(self.grammars.run(advance))
                else:
                    advance()

    def tokens_consumed(self, constrained: list[Constrained]) -> Iterator[Wait]:
        """Wait until every grammar knows the tokens of all steps before."""
        yield self._is_up_to_date
        for future in self._advancing:
            future.result()
        self._advancing.clear()
        self._note_failures(constrained)

    def warm_up(self) -> None:
        """Compile what no captured step holds. Nothing is in flight."""
        with torch.inference_mode():
            packer = Packer()
            packer.add([self._slots.dummy])
            packer.add([-1] * self._max_forced)
            slots, nothing = packer.upload(self._device)
            if self._max_forced:
                place_forced(self._slots.window, self._parents, slots, nothing.view(1, -1))
            self._masks.clear(slots)

    def proposes(self, width: int) -> bool:
        """Whether the window of a step has room for forced tokens, which must be known before its layers run."""
        return self._max_forced > 0 and width > 1

    def propose_forced(self, constrained: list[Constrained], width: int) -> None:
        """Let windows begin with what must follow. Sync: never."""
        most = min(self._max_forced, width - 1)
        rooms = [(each, min(most, self._slots.steps_of(each.slot))) for each in constrained]
        forced = [(each.slot, each.grammar.forced[:room]) for each, room in rooms if room and each.grammar.forced]
        if not forced:
            return
        packer = Packer()
        packer.add(slot for slot, _ in forced)
        packer.add(token for _, tokens in forced for token in (*tokens, *[-1] * (most - len(tokens))))
        slots, tokens = packer.upload(self._device)
        place_forced(self._slots.window, self._parents, slots, tokens.view(len(forced), most))

    def read_windows(self, constrained: list[Constrained], width: int) -> None:
        """Start to copy out what the step will verify: the target's layers, which follow, take longer. Sync: never."""
        self._window = self._device.download(self._windows(constrained, width))

    def step_masks(self, handle: StepHandle, constrained: list[Constrained], width: int) -> Iterator[Wait]:
        """Compute a mask for each column of the windows and upload them."""
        yield from self.tokens_consumed(constrained)
        yield self._window.ready
        handle.host.masks_begin = time.monotonic()
        rows = [(row[:width], row[width:] or None) for row in self._window.rows()]
        yield from self._write(handle, constrained, rows)

    def first_masks(self, handle: StepHandle, constrained: list[Constrained]) -> Iterator[Wait]:
        """The same for first tokens, which no guess comes before."""
        yield from self.tokens_consumed(constrained)
        handle.host.masks_begin = time.monotonic()
        yield from self._write(handle, constrained, [([-1], None)] * len(constrained))

    def replayed_masks(self, handle: StepHandle, constrained: list[Constrained]) -> Iterator[Wait]:
        """Those of an audit's tokens. The grammars then consume what was served, which is in the plan."""
        handle.host.masks_begin = time.monotonic()
        yield from self._write(handle, constrained, [([-1], None)] * len(constrained))
        for each in constrained:
            each.grammar.advance([handle.plan.work[each.row].next_token])

    def take_failed(self) -> list[GrammarFailed]:
        """Grammars that cannot go on, which the scheduler has not been told."""
        failed, self._failed = self._failed, []
        return failed

    def clear(self, slots: list[int]) -> None:
        """These slots have new requests, without a grammar. Sync: never."""
        if slots:
            packer = Packer()
            packer.add(slots)
            self._masks.clear(packer.upload(self._device)[0])

    def _done(self, tasks: Sequence[Callable[[], None]]) -> Iterator[Wait]:
        """Wait for tasks, one of each grammar."""
        if len(tasks) > FEW:
            futures = [self.grammars.run(task) for task in tasks]
            yield lambda: _are_done(futures)
            for future in futures:
                future.result()
            return
        for task in tasks:
            task()
            yield _after_one_look()

    def _note_failures(self, constrained: Sequence[Constrained]) -> None:
        self._failed += self.grammars.failures([each.uid for each in constrained])

    def _on_device(self, constrained: Sequence[Constrained]) -> Tensor:
        """The slots, which most often are there already. Shapes: -> [G] i64."""
        slots = [each.slot for each in constrained]
        if self._uploaded[0] != slots:
            packer = Packer()
            packer.add(slots)
            self._uploaded = slots, packer.upload(self._device)[0].clone()
        return self._uploaded[1]

    def _is_up_to_date(self) -> bool:
        self.read_tokens()
        return not self._unread and _are_done(self._advancing)

    def _windows(self, constrained: list[Constrained], width: int) -> Tensor:
        slots = self._on_device(constrained)
        windows = self._slots.window[slots, :width]
        if self._parents is not None and width > 1:
            return torch.cat((windows, self._parents[slots, :width]), 1)
        return windows.contiguous()

    def _write(
        self, handle: StepHandle, constrained: list[Constrained], windows: Sequence[tuple[list[int], list[int] | None]]
    ) -> Iterator[Wait]:
        width, words = len(windows[0][0]), self.grammars.mask_words
        masks = torch.full((len(constrained), width, words), -1, dtype=torch.int32)  # all is allowed
        tasks = [
            _fill(each.grammar, *window, masks[i])
            for i, (each, window) in enumerate(zip(constrained, windows, strict=True))
        ]
        yield from self._done(tasks)
        self._note_failures(constrained)
        handle.host.masks_end = time.monotonic()
        self._masks.write(self._on_device(constrained), self._device.upload(masks.view(-1).view(torch.int64)))


def _are_done(futures: Sequence[Future[None]]) -> bool:
    """Whether threads are through; lets them run for a while if they are not."""
    return all(future.done() for future in futures) or not wait(futures, LOOK_S).not_done


def _after_one_look() -> Wait:
    """A wait that ends when the loop has looked at everything else once."""
    looks = iter((False,))
    return lambda: next(looks, True)


def _advance(grammar: RequestGrammar, tokens: list[int]) -> Callable[[], None]:
    return lambda: grammar.advance(tokens)


def _fill(grammar: RequestGrammar, tokens: list[int], parents: list[int] | None, masks: Tensor) -> Callable[[], None]:
    return lambda: grammar.fill(tokens, parents, masks)

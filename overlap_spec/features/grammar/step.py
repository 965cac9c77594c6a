"""One step's masks: what a step with grammars waits for, and what it copies.

    host   | tokens of step N | forced tokens |           | window of N + 1 | masks ............. |
    device | .. C of step N ..                | forced, A of step N + 1 ........................ | B, masked | C

Only the launch of this step waits; the worker's loop goes on. Every wait is a function that tells whether it is over.
Grammars are followed in the loop, all windows in one call; slow ones in threads (`slow_grammars.py`).

Two decisions go by time, so this hook is `timed`: what must follow is proposed only if no tokens are under way, and a
slot is left out of a step whose masks are late. `PatientGrammarSteps` does neither, where several ranks must do the
same.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from overlap_spec_kernels import place_forced
from torch import Tensor

from overlap_spec.features.grammar import DropGrammar, GrammarFailed, PrepareGrammar
from overlap_spec.features.grammar.grammars import Grammars, RequestGrammar
from overlap_spec.features.grammar.slow_grammars import SlowGrammars
from overlap_spec.features.grammar.window_masks import HostWindow, TokenMasks
from overlap_spec.messages import Extension, Replayed, ResetSlot, StepPlan, find
from overlap_spec.speculative.interfaces import Tree
from overlap_spec.worker.devices import Device, Packer
from overlap_spec.worker.hooks import StepHook, Wait
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import StepHandle

MOST_AT_ONCE_S = 0.01  # of the loop's time for grammars: what is left then is done in threads
WINDOWS_AT_ONCE = 4  # of each of the library's threads, between looks at the clock
FORCING_PAYS = 0.5  # forced tokens of a slot and step: from here on a step gains by waiting for them


@dataclass(frozen=True)
class Constrained:
    """A slot of a step whose request has a grammar."""

    row: int  # in the plan
    slot: int
    uid: int
    grammar: RequestGrammar


class GrammarSteps(StepHook):
    """Follows the grammars of slots from step to step. `proposes`: what must follow is put into windows."""

    timed = True

    def __init__(self, grammars: Grammars, slots: SlotRows, device: Device, tree: Tree | None, proposes: bool) -> None:
        self.grammars = grammars
        self.slow = SlowGrammars(grammars)
        self._masks = TokenMasks.allocate(
            len(slots.length), slots.width, grammars.window_masks.words, device.torch_device
        )
        self.stages = (self._masks,)
        self._slots = slots
        self._device = device
        self._max_forced = (slots.width - 1 if tree is None else tree.num_levels) if proposes else 0
        self._parents = None if tree is None else slots.parents
        self._uids: dict[int, int] = {}  # of slots with a grammar
        self._owned: tuple[list[int], list[Constrained]] = [], []  # slots of the last step, and their owners
        self._taking_part: dict[StepHandle, list[Constrained]] = {}  # of steps that are being launched
        self._active: set[int] = set()  # slots whose masks are read
        self._unread: deque[tuple[StepHandle, list[Constrained]]] = deque()  # tokens that are not on the host yet
        self._audited: StepHandle | None = None  # the last audit's step
        self._reading: list[Constrained] = []  # whose windows are on their way
        self._windows = device.mirror(slots.columns)
        self._has_begun = False  # a request with a grammar has come; before that the loop need not ask for news
        self._failed: list[GrammarFailed] = []  # which the scheduler is to be told before the results that follow

    # --- points of a step -----------------------------------------------------------------------------------

    def changed(self, plan: StepPlan) -> None:
        """Note the grammars of new requests. Slots whose grammar is gone with its request have no masks any more."""
        resets = plan.resets
        cleared = [slot for slot, reset in resets.items() if self._uids.pop(slot, 0) and not _grammar_of(reset)]
        begun = {slot: uid for slot, reset in resets.items() if (uid := _grammar_of(reset))}
        self._uids |= begun
        self._owned = [], []
        for uid in begun.values():
            self.slow.judged(uid)  # what a slot was late with that it had before
            if find(plan.extensions, Replayed) is not None:
                self.grammars.restart(uid)
        if cleared:
            self._active.difference_update(cleared)
            self._masks.clear(self._uploaded(cleared))

    def runs_apart(self, plan: StepPlan) -> bool:
        """Whether a slot of the step has a grammar, or a request with one begins there."""
        return any(_grammar_of(plan.resets[slot]) if slot in plan.resets else slot in self._uids for slot in plan.rows)

    def before_layers(self, handle: StepHandle) -> Iterable[Wait]:
        """Let windows begin with what must follow, and start to copy them out."""
        plan, taking_part = handle.plan, self._owners(handle.plan) if self._uids else []
        if taking_part and plan.chunks:
            taking_part = [each for each in taking_part if plan.chunks[each.row].next_token < 0]
        if not taking_part:
            return ()
        self._taking_part[handle] = taking_part
        if plan.chunks or find(plan.extensions, Replayed) is not None:
            return ()
        return self._windows_read(taking_part, plan.width)

    def before_decide(self, handle: StepHandle) -> Iterable[Wait]:
        """Compute masks."""
        taking_part = self._taking_part.get(handle) if self._taking_part else None
        if taking_part is None:
            return ()
        if handle.plan.chunks:
            return self._first_masks(handle, taking_part)
        replayed = find(handle.plan.extensions, Replayed)
        if replayed is not None:
            return self._replayed_masks(handle, taking_part, replayed)
        return self._step_masks(handle, taking_part)

    def published(self, handle: StepHandle) -> None:
        """The step's tokens are on their way: grammars consume them when they have come."""
        if not self._taking_part:
            return
        found = self._taking_part.pop(handle, [])
        if find(handle.plan.extensions, Replayed) is not None:
            return  # they are known, and consumed
        taking_part = [each for each in found if each.row not in handle.left_out]
        for each in taking_part:
            self.slow.judged(each.uid)
        if taking_part:
            self._unread.append((handle, taking_part))
            self.read_tokens()

    # --- the worker's loop ----------------------------------------------------------------------------------

    def message(self, message: Extension) -> bool:
        """Compile a grammar, or forget one."""
        if isinstance(message, PrepareGrammar):
            self._has_begun = True
            self.grammars.prepare(message)
        elif isinstance(message, DropGrammar):
            self._drop(message)
        else:
            return False
        return True

    def replies(self) -> Sequence[Extension]:
        """What became of grammars, and those that cannot go on."""
        if not self._has_begun:
            return ()
        found = [*self.grammars.replies(), *self._failed, *self.grammars.bound_memory()]
        self._failed.clear()
        return found

    def is_busy(self) -> bool:
        """Whether a grammar is being compiled."""
        return self._has_begun and self.grammars.compiling

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

    def close(self) -> None:
        """End the threads."""
        self.grammars.close()

    # --- tokens ---------------------------------------------------------------------------------------------

    def _owners(self, plan: StepPlan) -> list[Constrained]:
        """The step's slots with a grammar. The same list as long as the slots are the same."""
        slots = plan.rows
        if self._owned[0] != slots:
            owned = [(row, slot, uid) for row, slot in enumerate(slots) if (uid := self._uids.get(slot, 0))]
            self._owned = slots, [Constrained(row, slot, uid, self.grammars.of(uid)) for row, slot, uid in owned]
        return self._owned[1]

    def _drop(self, message: DropGrammar) -> None:
        """Forget a request's grammar. No step in flight has it; a thread may, and tokens that were not read yet."""
        self._unread = deque(
            (handle, [each for each in constrained if each.uid != message.uid]) for handle, constrained in self._unread
        )
        self._owned = [], []  # which may have it
        is_busy = self.slow.is_busy(message.uid)
        self.slow.forget(message.uid)
        self.grammars.drop(message, is_busy)

    def read_tokens(self) -> None:
        """Let grammars consume the tokens that have come. Sync: never."""
        while self._unread and self._unread[0][0].ready():
            handle, constrained = self._unread.popleft()
            tokens = handle.tokens()
            quick = []
            for each in constrained:
                if self._in_thread(each):
                    self.slow.advance(each.uid, tokens[each.row])
                else:
                    quick.append(each)
            self._advance(quick, tokens)

    def _advance(self, constrained: Sequence[Constrained], tokens: Sequence[Sequence[int]]) -> None:
        """Let grammars consume tokens here and now, or in threads what would take the loop too long."""
        begun, seconds, done = time.perf_counter(), 0.0, []
        for each in constrained:
            if seconds > MOST_AT_ONCE_S:
                self.slow.advance(each.uid, tokens[each.row])
                continue
            each.grammar.advance(tokens[each.row])
            done.append(each.grammar)
            seconds = time.perf_counter() - begun
        if done:
            self.slow.note_time(done, seconds)

    # --- windows and masks ----------------------------------------------------------------------------------

    def _windows_read(self, constrained: Sequence[Constrained], width: int) -> Iterator[Wait]:
        if self._awaits_forced(constrained, width):
            yield self._are_tokens_read
        self._propose_forced(constrained, width)
        self._read_windows(constrained, width)

    def _awaits_forced(self, constrained: Sequence[Constrained], width: int) -> bool:
        """Whether the layers of a step wait until it is known what must follow, to verify that.

        The device has nothing to do meanwhile. That pays where much must follow: keys of objects, but not numbers.
        """
        if self._max_forced == 0 or width == 1:
            return False
        return sum(each.grammar.forcing for each in constrained) >= FORCING_PAYS * len(constrained)

    def _propose_forced(self, constrained: Sequence[Constrained], width: int) -> None:
        """Let windows begin with what must follow, where that is known and masks are not under way. Sync: never."""
        most = min(self._max_forced, width - 1)
        if most == 0 or self._unread:
            return
        known = [each for each in constrained if not (self.slow.is_busy(each.uid) or self.slow.filling(each.uid, 1))]
        rooms = [(each, min(most, self._slots.steps_of(each.slot))) for each in known]
        forced = [(each.slot, each.grammar.forced[:room]) for each, room in rooms if room and each.grammar.forced]
        if not forced:
            return
        packer = Packer()
        packer.add(slot for slot, _ in forced)
        packer.add(token for _, tokens in forced for token in (*tokens, *[-1] * (most - len(tokens))))
        slots, tokens = packer.upload(self._device)
        place_forced(self._slots.window, self._parents, slots, tokens.view(len(forced), most))

    def _read_windows(self, constrained: Sequence[Constrained], width: int) -> None:
        """Start to copy out the windows, of which some have no masks yet. Sync: never.

        All slots' windows are one small copy. On a CPU threads begin with them now, as the target's layers take the
        time of this thread.
        """
        self._reading = [each for each in constrained if self.slow.filling(each.uid, width) is None]
        if self._reading:
            self._windows.refresh()
        if self._reading and not (self._device.asynchronous or self._unread):
            self._read(width)

    def _step_masks(self, handle: StepHandle, constrained: Sequence[Constrained]) -> Generator[Wait, None, None]:
        """Compute a mask for each column of the windows; note which slots are left out."""
        layers = self._device.now()  # when the step's layers are through
        yield self._are_tokens_read
        width = handle.plan.width
        if self._reading:
            yield self._windows.ready
        begun = time.monotonic()
        self._compute_or_leave(self._read(width))
        slow = [(each, filling) for each in constrained if (filling := self.slow.filling(each.uid, width)) is not None]
        if slow:
            has_others = len(slow) < len(handle.plan.rows)
            late = yield from self.slow.late([filling for _, filling in slow], layers, has_others)
            for (each, filling), is_late in zip(slow, late, strict=True):
                if is_late:
                    handle.leave_out(each.row)
                else:
                    self._masks.bits[each.slot, : filling.width] = filling.masks.result()
                    self._activate([each])
        self._note_failures([each for each in constrained if each.row not in handle.left_out])
        _note_time(handle, begun)

    def _first_masks(self, handle: StepHandle, constrained: Sequence[Constrained]) -> Iterator[Wait]:
        """The same for first tokens, which no guess comes before. A grammar may still be in a thread."""
        yield self._are_tokens_read
        yield self.slow.idle([each.uid for each in constrained])
        begun = time.monotonic()
        self._compute([(each, HostWindow([-1])) for each in constrained])
        self._note_failures(constrained)
        _note_time(handle, begun)

    def _replayed_masks(
        self, handle: StepHandle, constrained: Sequence[Constrained], replayed: Replayed
    ) -> Iterator[Wait]:
        """Those of an audit's tokens. The grammars then consume what was served, which is in the plan.

        Waits for the step of audits before, which reads the same rows of masks.
        """
        if self._audited is not None:
            yield self._audited.ready
        self._audited = handle
        begun = time.monotonic()
        self._compute([(each, HostWindow([-1])) for each in constrained])
        self._note_failures(constrained)
        _note_time(handle, begun)
        for each in constrained:
            each.grammar.advance([replayed.served[each.row]])

    def _in_thread(self, each: Constrained) -> bool:
        """Whether the loop leaves a grammar to threads."""
        return each.grammar.is_slow or self.slow.is_busy(each.uid)

    def _are_tokens_read(self) -> bool:
        self.read_tokens()
        return not self._unread

    def _read(self, width: int) -> list[tuple[Constrained, HostWindow]]:
        """Windows that have come, but for those of slow grammars: threads begin with them."""
        if not self._reading:
            return []
        quick, read = [], self._windows.rows([each.slot for each in self._reading])
        for each, (tokens, parents) in zip(self._reading, read, strict=True):
            is_chain = self._parents is None or width == 1
            window = HostWindow(tokens[:width], None if is_chain else parents[:width])
            if self.slow.filling(each.uid, width) is not None:
                continue
            if self._in_thread(each):
                self.slow.fill(each.uid, window)
            else:
                quick.append((each, window))
        return quick

    def _compute_or_leave(self, windows: Sequence[tuple[Constrained, HostWindow]]) -> None:
        """Compute masks here and now, or in threads what would take the loop too long."""
        begun, num_at_once = time.perf_counter(), WINDOWS_AT_ONCE * self.grammars.window_masks.num_threads
        for start in range(0, len(windows), num_at_once):
            if time.perf_counter() - begun > MOST_AT_ONCE_S:
                for each, window in windows[start:]:
                    self.slow.fill(each.uid, window)
                return
            self._compute(windows[start : start + num_at_once])

    def _compute(self, windows: Sequence[tuple[Constrained, HostWindow]]) -> None:
        if not windows:
            return
        begun, constrained = time.perf_counter(), [each for each, _ in windows]
        grammars, width = [each.grammar for each in constrained], self._slots.width
        places = [each.slot * width for each in constrained]
        self.grammars.masks(grammars, [window for _, window in windows], self._masks.rows, places)
        self.slow.note_time(grammars, time.perf_counter() - begun)
        self._activate(constrained)

    def _activate(self, constrained: Sequence[Constrained]) -> None:
        """Let the masks of these slots be read from now on."""
        new = [each.slot for each in constrained if each.slot not in self._active]
        if new:
            self._active.update(new)
            self._masks.activate(self._uploaded(new))

    def _note_failures(self, constrained: Sequence[Constrained]) -> None:
        for each in constrained:
            if each.grammar.failure:
                self._failed += self.grammars.failed(each.uid)

    def _uploaded(self, slots: list[int]) -> Tensor:
        packer = Packer()
        packer.add(slots)
        return packer.upload(self._device)[0]


class PatientGrammarSteps(GrammarSteps):
    """Those of one of several ranks: steps wait for all masks, and what must follow is left to the draft to guess.

    All ranks then draw from equal masks, which follow from tokens and windows alone.
    """

    timed = False

    def __init__(self, grammars: Grammars, slots: SlotRows, device: Device, tree: Tree | None) -> None:
        super().__init__(grammars, slots, device, tree, proposes=False)
        self.slow.is_patient = grammars.keep_going = True


def _note_time(handle: StepHandle, begun: float) -> None:
    handle.host.of_features = (*handle.host.of_features, ("masks of grammars", begun, time.monotonic()))


def _grammar_of(reset: ResetSlot) -> int:
    """The uid that the request's grammar was prepared under; 0 without one."""
    return 0 if reset.sampling.grammar is None else reset.uid

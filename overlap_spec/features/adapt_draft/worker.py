"""Learning in the worker: keeps what the target computes, and does what the scheduler asks for, between two steps.

    plans    changed(): slots of followed requests write to their segments from now on
    orders   message() ── between steps ──> Learner ── the device is through ──> Worked

An order is carried out when it comes, or, if a step is being launched, right after its launch. So the device does steps
and orders in the order in which the scheduler sent them. One that costs nothing waits until no step has come for long.
"""

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from msgspec.structs import replace
from overlap_spec_kernels import keep_states
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.errors import ConfigError, OverlapSpecError
from overlap_spec.features.adapt_draft import (
    Finished,
    Follow,
    GoBack,
    HeadLoaded,
    Judge,
    LearningRoom,
    LoadHead,
    StartAgain,
    TakeOver,
    Train,
    Watch,
    Worked,
)
from overlap_spec.features.adapt_draft.learner import (
    UPDATE,
    HeadReader,
    Learner,
    Learnt,
    Packed,
    Sample,
    Saver,
    batches,
    laid_out,
    training_bytes,
)
from overlap_spec.features.adapt_draft.ring import StateRing, WatchedProposer
from overlap_spec.messages import Extension, StepPlan
from overlap_spec.models.drafts.eagle3 import Eagle3Weights
from overlap_spec.speculative.drafts import ChainDraft, EngineShape
from overlap_spec.speculative.interfaces import Proposer
from overlap_spec.train_draft.eagle3 import check_learns
from overlap_spec.train_draft.head import Tensors, accept_length
from overlap_spec.train_draft.steps import Replays
from overlap_spec.worker.build import Parts
from overlap_spec.worker.devices import Device, DeviceEvent, Download
from overlap_spec.worker.hooks import Needs, StepHook, Wait
from overlap_spec.worker.startup.geometry import LoadedModels
from overlap_spec.worker.step import StepHandle

SEGMENTS, SEGMENT_ROWS = 64, 256
GPU_BATCH, WIDE_BATCH, CPU_BATCH = 8, 4, 2  # segments of a step; of a wide target's on a GPU
WIDE = 2048
FLAG = "adapt_draft"
SHARES = 4  # numbers of places that a GPU tells apart, as shares of a batch's rows
LEAST_ROWS = 16  # of a sample in a CPU's batch: more than a chain has steps
CAPTURED = 3  # steps of a shape: operation by operation, captured, replayed
KEPT = 64  # launches that keep states, timed together
CPU_PARAMETERS = 2_000_000  # of a head that a CPU trains in tens of milliseconds a step

T = TypeVar("T")
Order = Train | Judge | TakeOver | GoBack | StartAgain

log = logging.getLogger(__name__)


def room_of(settings: Settings, hidden_size: int) -> LearningRoom:
    """The ring's segments, and how many of them a step of training reads."""
    on_gpu = WIDE_BATCH if hidden_size > WIDE else GPU_BATCH
    return LearningRoom(SEGMENTS, SEGMENT_ROWS, CPU_BATCH if settings.model.device == "cpu" else on_gpu)


def weights_of(settings: Settings, models: LoadedModels) -> Eagle3Weights:
    """Raises: ConfigError if the draft is none that learns, or none that can where it is."""
    proposer, like = models.proposer, models.target.embedding
    if settings.model.device == "cpu" and proposer.profile.num_bytes > CPU_PARAMETERS * like.dtype.itemsize:
        millions = proposer.profile.num_bytes // like.dtype.itemsize / 1e6
        text = f"a CPU would hold up requests for seconds while it trains {millions:.0f} million parameters; use a GPU"
        raise ConfigError(FLAG, text)
    return check_learns(proposer.draft if isinstance(proposer, ChainDraft) else proposer, models.target, FLAG)


def needs(settings: Settings, models: LoadedModels) -> Needs:
    """Memory of the ring, of the copy with its gradients and moments, and of a step. Raises: ConfigError."""
    if not settings.adapt.share:
        return Needs()
    weights, room = weights_of(settings, models), room_of(settings, models.target.hidden_size)
    columns = (len(weights.config.aux_layers) + 1) * models.target.hidden_size
    ring = room.num_segments * room.segment_rows * columns * weights.embedding.dtype.itemsize
    return Needs(num_bytes=ring + training_bytes(weights, room.batch * room.segment_rows, room.segment_rows))


def watch(
    settings: Settings, models: LoadedModels, proposer: Proposer[Any], shape: EngineShape
) -> WatchedProposer | None:
    """The proposer with a ring. Raises: ConfigError."""
    if not settings.adapt.share:
        return None
    weights, room = weights_of(settings, models), room_of(settings, shape.hidden_size)
    ring = StateRing.allocate(room.num_segments, room.segment_rows, len(weights.config.aux_layers), shape)
    return WatchedProposer(proposer, ring, weights, models.target)


def attach(parts: Parts) -> StepHook | None:
    """Learn, if the proposer is watched. Raises: ConfigError if a head cannot be saved where it is to be."""
    proposer, settings = parts.method.proposer, parts.settings
    if not isinstance(proposer, WatchedProposer):
        if not settings.adapt.updates or parts.models is None:
            return None
        return UpdateHook(reader_of(parts.models), parts.device)
    num_guesses = parts.geometry.width - 1
    learner = Learner(proposer.weights, proposer.target, SEGMENT_ROWS + 64, num_guesses)
    saver = None if settings.adapt.save is None else Saver(Path(settings.adapt.save), settings.spec, proposer.target)
    return LearningHook(learner, proposer.ring, room_of(settings, proposer.target.hidden_size), parts.device, saver)


@dataclass(frozen=True)
class _Done:
    """An order that is carried out. `samples`: those that were judged, in order, each with so many rows."""

    begin: DeviceEvent
    download: Download
    samples: Sequence[Sample]  # none of a step of training
    length: int

    def worked(self, upkeep_s: float) -> Worked:
        """Read the counts that have been copied to the host; the copy has ended."""
        ((finite, *counts),) = self.download.rows()
        seconds, found = self.download.done.since(self.begin), array("q", counts)
        lengths, begins = [len(each.tokens) for each in self.samples], [each.begin for each in self.samples]
        rows = [found[first : first + self.length] for first in range(0, len(found), self.length or 1)]
        live, of_copy = (accept_length(rows[first::2], begins, lengths) for first in (0, 1))
        return Worked(seconds, live, of_copy, bool(finite), upkeep_s)


def reader_of(models: LoadedModels) -> HeadReader:
    """What reads heads for the draft that was loaded, of chains or of trees."""
    chain = getattr(models.proposer, "chain", models.proposer)
    try:
        return HeadReader(check_learns(getattr(chain, "draft", chain), models.target, UPDATE), models.target)
    except ConfigError as error:
        return HeadReader(None, models.target, str(error).partition(": ")[2])


class UpdateHook(StepHook):
    """Writes heads from disk over the one that serves, between two steps. A thread reads them, one after another."""

    def __init__(self, reader: HeadReader, device: Device) -> None:
        self._reader, self._device = reader, device
        self._launching = False
        self._wanted: deque[LoadHead] = deque()
        self._reading: Future[Tensors] | None = None  # the first of those
        self._written: tuple[Tensors, DeviceEvent] | None = None  # which the device may still be reading

    def serves(self, trace: object) -> None:
        self._launching = False

    def before_layers(self, handle: StepHandle) -> Iterable[Wait]:
        self._launching = True
        return ()

    def launched(self, handle: StepHandle) -> None:
        self._launching = False

    def message(self, message: Extension) -> bool:
        if not isinstance(message, LoadHead):
            return False
        self._wanted.append(message)
        return True

    def is_busy(self) -> bool:
        return bool(self._wanted)

    def replies(self) -> Sequence[Extension]:
        """Begin to read, write what was read, or tell that it is written: one thing at a time."""
        if not self._wanted or self._launching:
            return ()
        if self._reading is None:
            self._reading = in_thread(partial(self._reader.read, self._wanted[0].path, self._wanted[0].load_format))
            return ()
        if not self._reading.done() or (self._written is not None and not self._written[1].passed()):
            return ()
        error = "" if self._written is not None else self._write(self._reading)
        if not error and not cast("tuple[Tensors, DeviceEvent]", self._written)[1].passed():
            return ()
        self._reading = self._written = None
        return (HeadLoaded(self._wanted.popleft().number, error),)

    def _write(self, read: "Future[Tensors]") -> str:
        """Returns why not. Sync: never."""
        try:
            tensors = read.result()
        except Exception as error:  # of a file that anyone may have written: the engine goes on
            log.warning("The draft stays as it is: %s", error)
            return f"{error}" if isinstance(error, OverlapSpecError | OSError) else f"{type(error).__name__}: {error}"
        assert self._reader.live is not None, "then it could not be read"
        self._reader.live.write(tensors)
        self.replaced()
        self._written = tensors, self._device.now()
        log.info("The draft has the weights of %s now", self._wanted[0].path)
        return ""

    def replaced(self) -> None:
        """Another head serves now."""


def in_thread(work: Callable[[], T]) -> "Future[T]":
    """Do it in a thread of its own, which does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class LearningHook(UpdateHook):
    """Owner of the ring's samples, and of the learner."""

    timed = True  # orders wait until no step has come for some time

    def __init__(
        self, learner: Learner, ring: StateRing, room: LearningRoom, device: Device, saver: Saver | None
    ) -> None:
        super().__init__(learner.reader, device)
        self.learner, self.ring = learner, ring
        self._room, self._saver = room, saver
        self._following: dict[int, Follow] = {}  # by uid, of requests whose first step is still to come
        self._missing: dict[int, int] = {}  # by segment, its rows whose states were cached and not computed
        self.samples: dict[int, Sample] = {}
        self._followed = set[int]()  # slots that write to a segment
        self._orders: deque[Order] = deque()
        self._patient: Train | Judge | None = None  # it waits until no step has come for long
        self._still_since = 0.0  # time.monotonic()
        self._has_stepped = True  # since then
        self._watch = Watch()
        self._has_worked = False
        self._done: _Done | None = None
        self._inputs: dict[tuple[int, ...], Tensor] = {}  # of each shape of batches, on the device

    def ready(self) -> tuple[LearningRoom]:
        return (self._room,)

    def warm_up(self) -> None:
        """On a GPU take steps with each number of places, so that they are captured, and their memory is there.

        Raises: ConfigError if it is not.
        """
        if not self._device.asynchronous:
            return
        known, rows = int(self.learner.is_known.nonzero()[0]), self._room.segment_rows
        try:
            for length in range(rows // SHARES, rows + 1, rows // SHARES):
                self.samples = dict.fromkeys(range(self._room.batch), Sample([known] * length, 1, 0))
                for _ in range(CAPTURED):
                    self._train(tuple(self.samples))
                    self._judge(tuple(self.samples))
            self._device.finish()
            torch.cuda.empty_cache()  # of first steps: graphs have memory of their own
        except torch.OutOfMemoryError as error:
            text = f"learning has no memory left: {str(error).splitlines()[0]}"
            raise ConfigError("mem_fraction_static", text) from None
        self.learner.start_again()
        self.samples, self._done = {}, None
        self._room = replace(self._room, keep_s=self._seconds_of_keeping())

    def _seconds_of_keeping(self) -> float:
        """Of the device, for a launch that keeps a row of each slot."""
        ring, replays = self.ring, Replays(self._device.torch_device)
        slots = torch.arange(len(ring.places), device=ring.places.device)
        positions, aux, hidden = torch.zeros_like(slots)[:, None], ring.aux[slots], ring.hidden[slots]

        def work() -> None:
            for _ in range(KEPT):
                keep_states((ring.aux, ring.hidden), ring.places, slots, positions, aux, hidden)

        for _ in range(CAPTURED):
            begin = self._device.now()
            replays.run("keep", work)
            end = self._device.now()
            self._device.finish()
        return end.since(begin) / KEPT

    # --- steps ----------------------------------------------------------------------------------------------

    def changed(self, plan: StepPlan) -> None:
        """Requests take slots, and each is followed once: one that begins again has lost its segment."""
        with self._watch:
            self._change(plan)

    def _change(self, plan: StepPlan) -> None:
        starts = {chunk.slot: chunk.start for chunk in plan.chunks}
        found: dict[int, tuple[int, int] | None] = {}
        for slot, reset in plan.resets.items():
            if slot >= len(self.ring.places):
                continue  # of a feature's own steps, in which no draft takes part
            follow = self._following.pop(reset.uid, None)
            if follow is not None:
                found[slot] = follow.segment, follow.first
                self._followed.add(slot)
                self._missing[follow.segment] = max(starts.get(slot, 0) - follow.first, 0)
            elif slot in self._followed:
                found[slot] = None
                self._followed.remove(slot)
        if found:
            self.ring.follow(found, self._device)

    def before_layers(self, handle: StepHandle) -> Iterable[Wait]:
        """A step that comes after an order begins behind it: its time is none of the step's."""
        super().before_layers(handle)
        self._has_stepped = True
        if not self._has_worked:
            return ()
        self._has_worked = False
        return (_at_once,)

    def launched(self, handle: StepHandle) -> None:
        self._launching = False
        self._carry_out()

    # --- orders ---------------------------------------------------------------------------------------------

    def message(self, message: Extension) -> bool:
        match message:
            case Follow():
                self._following[message.uid] = message
            case Finished():
                with self._watch:
                    self._keep(message)
            case Train(still_s=still_s) | Judge(still_s=still_s) if still_s:
                self._patient = message
                if self._has_stepped:
                    self._still_since, self._has_stepped = time.monotonic(), False
            case Train() | Judge() | TakeOver() | GoBack() | StartAgain():
                self._orders.append(message)
                if not self._launching:
                    self._carry_out()
            case _:
                return super().message(message)
        return True

    def is_busy(self) -> bool:
        return self._done is not None or self._patient is not None or super().is_busy()

    def replies(self) -> Sequence[Extension]:
        of_updates, done = super().replies(), self._done
        if self._patient is not None:
            return (*of_updates, *self._waited(self._patient))
        if done is None or not done.download.ready():
            return of_updates
        self._done = None
        return (*of_updates, done.worked(self._upkeep()))

    def _waited(self, order: Train | Judge) -> Sequence[Worked]:
        """Begin with it, if no step has come for so long. If one has come, tell that it is not done."""
        if self._has_stepped:
            self._patient = None
            return (Worked(0.0, upkeep_s=self._upkeep(), is_done=False),)
        if time.monotonic() - self._still_since >= order.still_s:
            self._patient = None
            self._orders.append(order)
            self._carry_out()
        return ()

    def _upkeep(self) -> float:
        """Seconds of the host since it was last asked for."""
        return self._watch.taken() + (0.0 if self._saver is None else self._saver.watch.taken())

    def replaced(self) -> None:
        """The copy begins again with the head that has been written, and nothing leads back behind it."""
        self.learner.start_again()
        self.learner.keep()

    def close(self) -> None:
        """A head that is being written is written whole."""
        if self._saver is not None:
            self._saver.finish()

    def _keep(self, finished: Finished) -> None:
        tokens = torch.frombuffer(bytearray(finished.tokens), dtype=torch.int32)
        offset = min(self._missing.pop(finished.segment, 0), finished.start - 1)
        self.samples[finished.segment] = Sample(tokens[offset:], finished.start - offset, offset)

    def _carry_out(self) -> None:
        while self._orders:
            self._has_worked = True
            match order := self._orders.popleft():
                case Train():
                    self._train(order.segments)
                case Judge():
                    self._judge(order.segments)
                case _:
                    with self._watch:
                        self._swap(order)

    def _swap(self, order: TakeOver | GoBack | StartAgain) -> None:
        match order:
            case TakeOver():
                if self._saver is not None:
                    self._saver.wait_copied()
                self.learner.take_over()
                if self._saver is not None:
                    self._saver.save(self.learner)
            case GoBack():
                self.learner.go_back()
            case StartAgain():
                self.learner.start_again()

    def _train(self, segments: Sequence[int]) -> None:
        begin, packed = self._device.now(), self._packed(segments, self._length_of(segments))
        self.learner.step(packed.key, self._upload(packed))
        self._finish(begin, torch.ones(1, 1, dtype=torch.int64, device=self.ring.aux.device), (), 0)

    def _judge(self, segments: Sequence[int]) -> None:
        begin, length = self._device.now(), self._length_of(segments)
        finite, counts = torch.ones((), dtype=torch.bool, device=self.ring.aux.device), list[Tensor]()
        for part in batches(segments, self._room.batch):
            packed = self._packed(part, length, whole=True)
            judged = self.learner.judge(packed.key, self._upload(packed))
            finite = finite & judged.is_finite
            counts.append(torch.stack((judged.live, judged.copy), 1)[: len(part)].flatten())
        found = torch.cat((finite.long()[None], *counts))[None]
        self._finish(begin, found, [self.samples[segment] for segment in segments], length)

    def _finish(self, begin: DeviceEvent, found: Tensor, samples: Sequence[Sample], length: int) -> None:
        self._done = _Done(begin, self._device.download(found), samples, length)

    def _length_of(self, segments: Sequence[int]) -> int:
        """Rows of each sample in a batch: a CPU takes no more than there are, a GPU always as many."""
        longest = max(len(self.samples[segment].tokens) for segment in segments)
        return self._room.segment_rows if self._device.asynchronous else max(longest, LEAST_ROWS)

    def _packed(self, segments: Sequence[int], length: int, whole: bool = False) -> Packed:
        """Samples and the places of a loss; on a GPU in few shapes, each of which has a graph. Of `whole`, in one."""
        chosen = [(self.ring.first_row(each), self.samples[each]) for each in segments]
        if not self._device.asynchronous:
            laid = laid_out(chosen, self.learner.is_known, length)
            return Packed.of(laid, len(laid.places))
        laid = laid_out(chosen, self.learner.is_known, length, self._room.batch)
        share = laid.rows.numel() // SHARES
        return Packed.of(laid, share * (SHARES if whole else max(-(-len(laid.places) // share), 1)))

    def _upload(self, packed: Packed) -> Callable[[], Learnt]:
        """Copy it to where the last one of its shape was. Returns what reads it there, with the ring's states."""
        values = self._device.upload(packed.values)
        if self._device.asynchronous:
            if packed.key not in self._inputs:
                self._inputs[packed.key] = torch.empty_like(values)
            values = self._inputs[packed.key].copy_(values)
        return lambda: packed.read(values, self.ring.aux, self.ring.hidden)


def _at_once() -> bool:
    """Nothing is waited for."""
    return True

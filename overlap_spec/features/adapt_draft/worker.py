"""Learning in the worker: keeps what the target computes, and does what the scheduler asks for, between two steps.

    plans    changed(): slots of followed requests write to their segments from now on
    orders   message() ── between steps ──> Learner ── the device is through ──> Worked

An order is carried out when it comes, or, if a step is being launched, right after its launch. So the device does steps
and orders in the order in which the scheduler sent them.
"""

import logging
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.errors import ConfigError
from overlap_spec.features.adapt_draft.learner import (
    FLAG,
    ROUNDED,
    Learner,
    Sample,
    batches,
    check_learns,
    laid_out,
    training_bytes,
)
from overlap_spec.features.adapt_draft.messages import (
    Finished,
    Follow,
    GoBack,
    Judge,
    LearningRoom,
    StartAgain,
    TakeOver,
    Train,
    Worked,
)
from overlap_spec.features.adapt_draft.ring import StateRing, WatchedProposer
from overlap_spec.features.adapt_draft.saved import Saver
from overlap_spec.messages import Extension, StepPlan
from overlap_spec.models.drafts.eagle3 import Eagle3Weights
from overlap_spec.speculative.drafts import ChainDraft, EngineShape
from overlap_spec.speculative.interfaces import Proposer
from overlap_spec.train_draft.head import Batch, accept_length
from overlap_spec.worker.build import Parts
from overlap_spec.worker.devices import Device, DeviceEvent, Download
from overlap_spec.worker.hooks import Needs, StepHook, Wait
from overlap_spec.worker.startup.geometry import LoadedModels
from overlap_spec.worker.step import StepHandle

SEGMENTS, SEGMENT_ROWS = 64, 256
GPU_BATCH, WIDE_BATCH, CPU_BATCH = 8, 4, 2  # segments of a step; of a wide target's on a GPU
WIDE = 2048
CPU_PARAMETERS = 2_000_000  # of a head that a CPU trains in tens of milliseconds a step

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
    return check_learns(proposer.draft if isinstance(proposer, ChainDraft) else proposer, models.target)


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
        return None
    num_guesses = parts.geometry.width - 1
    learner = Learner(proposer.weights, proposer.target, SEGMENT_ROWS + 64, num_guesses)
    saver = None if settings.adapt.save is None else Saver(Path(settings.adapt.save), settings.spec, proposer.target)
    return LearningHook(learner, proposer.ring, room_of(settings, proposer.target.hidden_size), parts.device, saver)


@dataclass(frozen=True)
class _Done:
    """An order that is carried out. `samples`: those that were judged, in order; none of a step of training."""

    begin: DeviceEvent
    download: Download
    samples: Sequence[Sample]

    def worked(self) -> Worked:
        """Read the counts that have been copied to the host; the copy has ended."""
        ((finite, *counts),) = self.download.rows()
        seconds, found = self.download.done.since(self.begin), array("q", counts)
        lengths = [len(sample.tokens) for sample in self.samples]
        begins = [sample.begin for sample in self.samples]
        both: list[float] = []
        for first in (0, 1):
            rows, start = [], 0
            for length in lengths:
                rows.append(found[start + first * length : start + (first + 1) * length])
                start += 2 * length
            both.append(accept_length(rows, begins, lengths))
        return Worked(seconds, both[0], both[1], bool(finite))


class LearningHook(StepHook):
    """Owner of the ring's samples, and of the learner."""

    def __init__(
        self, learner: Learner, ring: StateRing, room: LearningRoom, device: Device, saver: Saver | None
    ) -> None:
        self.learner, self.ring = learner, ring
        self._room, self._device, self._saver = room, device, saver
        self._following: dict[int, Follow] = {}  # by uid, of requests whose first step is still to come
        self._missing: dict[int, int] = {}  # by segment, its rows whose states were cached and not computed
        self.samples: dict[int, Sample] = {}
        self._orders: deque[Order] = deque()
        self._launching = self._has_worked = False
        self._done: _Done | None = None

    def ready(self) -> tuple[LearningRoom]:
        return (self._room,)

    def serves(self, trace: object) -> None:
        self._launching = False

    def warm_up(self) -> None:
        """On a GPU take a step of each length, so that kernels are loaded, and the memory of the largest is there.

        Raises: ConfigError if it is not.
        """
        if not self._device.asynchronous:
            return
        known = int(self.learner.is_known.nonzero()[0])
        rows = self._room.segment_rows
        try:
            for length in reversed(range(rows, 0, -ROUNDED)):
                self.samples = dict.fromkeys(range(self._room.batch), Sample([known] * length, 1, 0))
                self._train(tuple(self.samples))
                self._judge(tuple(self.samples))
            self._device.finish()
        except torch.OutOfMemoryError as error:
            text = f"learning has no memory left: {str(error).splitlines()[0]}"
            raise ConfigError("mem_fraction_static", text) from None
        self.learner.start_again()
        self.samples, self._done = {}, None

    # --- steps ----------------------------------------------------------------------------------------------

    def changed(self, plan: StepPlan) -> None:
        """Requests take slots, and each is followed once: one that begins again has lost its segment."""
        starts = {chunk.slot: chunk.start for chunk in plan.chunks}
        found: dict[int, tuple[int, int] | None] = {}
        for slot, reset in plan.resets.items():
            if slot >= len(self.ring.places):
                continue  # of a feature's own steps, in which no draft takes part
            follow = self._following.pop(reset.uid, None)
            found[slot] = None if follow is None else (follow.segment, follow.first)
            if follow is not None:
                self._missing[follow.segment] = max(starts.get(slot, 0) - follow.first, 0)
        if found:
            self.ring.follow(found, self._device)

    def before_layers(self, handle: StepHandle) -> Iterable[Wait]:
        """A step that comes after an order begins behind it: its time is none of the step's."""
        self._launching = True
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
                self._keep(message)
            case Train() | Judge() | TakeOver() | GoBack() | StartAgain():
                self._orders.append(message)
                if not self._launching:
                    self._carry_out()
            case _:
                return False
        return True

    def is_busy(self) -> bool:
        return self._done is not None

    def replies(self) -> Sequence[Extension]:
        done = self._done
        if done is None or not done.download.ready():
            return ()
        self._done = None
        return (done.worked(),)

    def close(self) -> None:
        """A head that is being written is written whole."""
        if self._saver is not None:
            self._saver.finish()

    def _keep(self, finished: Finished) -> None:
        tokens = array("i", finished.tokens)
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
        begin, (batch, places) = self._device.now(), self._read(segments)
        self.learner.step(batch, places)
        self._finish(begin, torch.ones(1, 1, dtype=torch.int64, device=places.device), ())

    def _judge(self, segments: Sequence[int]) -> None:
        begin = self._device.now()
        finite, counts = torch.ones((), dtype=torch.bool, device=self.ring.aux.device), list[Tensor]()
        for part in batches(segments, self._room.batch):
            batch, places = self._read(part)
            *both, is_finite = self.learner.judge(batch, places)
            finite = finite & is_finite
            for row, segment in enumerate(part):
                counts += [each[row, : len(self.samples[segment].tokens)] for each in both]
        found = torch.cat((finite.long()[None], *counts))[None]
        self._finish(begin, found, [self.samples[segment] for segment in segments])

    def _finish(self, begin: DeviceEvent, found: Tensor, samples: Sequence[Sample]) -> None:
        self._done = _Done(begin, self._device.download(found), samples)

    def _read(self, segments: Sequence[int]) -> tuple[Batch, Tensor]:
        """Samples with their states, and the places of a loss. Sync: never."""
        laid = laid_out([(self.ring.first_row(each), self.samples[each]) for each in segments], self.learner.is_known)
        host, count, shape = laid.batch, len(segments), laid.rows.shape
        sizes = (laid.rows.numel(), laid.rows.numel(), count, count, len(laid.places))
        packed = torch.cat((laid.rows.view(-1), host.tokens.view(-1), host.lengths, host.starts, laid.places))
        rows, tokens, lengths, starts, places = self._device.upload(packed).split(sizes)
        aux, hidden = (states[rows].view(*shape, -1) for states in (self.ring.aux, self.ring.hidden))
        return Batch(tokens.view(shape), aux, hidden, lengths, starts), places


def _at_once() -> bool:
    """Nothing is waited for."""
    return True

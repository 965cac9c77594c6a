"""The engine in this process: the scheduler's loop and the worker's executor, without sockets and other processes.

It answers prompts by plain decoding. Then it reads answered prompts again, as prompts, and their hidden states go to
the ring: the answers themselves were decoded in another order, and are read several times.

Hidden states leave the worker through a proposer that guesses nothing and writes what it is shown into a ring.

Methods give the worker their proposer, and the target keeps the outputs of the layers that a proposer names. So the
worker needs to know nothing of training. Rows go to the ring by the place of their request in it:

    row of a request's token i  ->  ring[base of its slot + i];  of a request without a base  ->  the last row

The base of each slot is on the device, so that captured steps write too. A part of the ring is written again when the
training step that reads it has been launched: both are in one stream.
"""

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from msgspec.structs import replace as replaced
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.errors import ConfigError
from overlap_spec.messages import (
    Abort,
    AbortReason,
    Admit,
    Refused,
    SamplingParams,
    StepPlan,
    ToFrontend,
    TokenDeltas,
    ToWorker,
)
from overlap_spec.models.interfaces import DraftProfile, LoadedTarget, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.scheduler.build import build_scheduler
from overlap_spec.scheduler.loop import Links
from overlap_spec.speculative.drafts import EngineShape, NoProposer
from overlap_spec.speculative.interfaces import Prompts
from overlap_spec.worker.build import build_executor, load_models, prepare_place
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.geometry import Geometry, settle_geometry
from overlap_spec.worker.startup.step_times import ChunkSize
from overlap_spec.worker.startup.warmup import (
    FEW_TOKENS,
    capture_graphs,
    cuda_prompt_lengths,
    precompiling,
    run_uncaptured,
    warm_up,
)
from overlap_spec.worker.step import StepHandle
from overlap_spec.worker.worker_actor import worker_ready

NOWHERE = -1
PARTS = 2  # one is trained on while the other is written


class FeatureRing:
    """Aux hidden states and the final one of so many rows (`LoadedProposer`, before it is attached)."""

    def __init__(self, aux_layers: tuple[int, ...], hidden_size: int, part_rows: int) -> None:
        """`part_rows`: of each part."""
        self._aux_layers, self._hidden_size = aux_layers, hidden_size
        self.part_rows = part_rows
        self._next = 0
        self._rows: Tensor
        self._bases: Tensor
        self._known: list[int] = []  # what the device has

    @property
    def profile(self) -> DraftProfile:
        return DraftProfile(aux_layers=self._aux_layers)

    def attach(self, cache: KVCache, shape: EngineShape) -> "RingWriter":
        """Take the ring's memory."""
        width = (len(self._aux_layers) + 1) * self._hidden_size
        count = PARTS * self.part_rows + 1
        self._rows = torch.zeros(count, width, dtype=shape.dtype, device=shape.device)
        self._known = [NOWHERE] * shape.num_rows
        self._bases = torch.tensor(self._known, device=shape.device)
        return RingWriter(self._rows, self._bases)

    def part(self) -> int:
        """The first row of the part that is free next."""
        begin, self._next = self._next * self.part_rows, (self._next + 1) % PARTS
        return begin

    def place(self, bases: Mapping[int, int]) -> None:
        """Requests take slots, and their rows go there from now on; `NOWHERE`: they are not kept. Sync: never."""
        changed = [slot for slot, base in bases.items() if self._known[slot] != base]
        if not changed:
            return
        for slot in changed:
            self._known[slot] = bases[slot]
        device = self._bases.device
        values = torch.tensor([self._known[slot] for slot in changed], device=device)
        self._bases[torch.tensor(changed, device=device)] = values

    def read(self, begin: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Rows of `count` requests with `length` rows each. Shapes: -> aux [B, L, n * H], hidden [B, L, H]."""
        assert count * length <= self.part_rows, "a batch fits a part of the ring"
        rows = self._rows[begin : begin + count * length].view(count, length, -1)
        aux = len(self._aux_layers) * self._hidden_size
        return rows[..., :aux], rows[..., aux:]


@dataclass(frozen=True)
class RingWriter(NoProposer):
    """The proposer. `rows` [N + 1, (n + 1) * H], `bases` [S + 1] i64."""

    rows: Tensor
    bases: Tensor

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Any:
        """Write the rows of prompts. Sync: never."""
        assert rows.row_starts is not None, "chunks say where their rows are"
        places = torch.ones_like(rows.positions).cumsum(0)
        chunks = torch.searchsorted(rows.row_starts[1:].long(), places)
        bases = self.bases[prompts.chunk_slots[chunks]]
        index = torch.where(bases == NOWHERE, len(self.rows) - 1, bases + rows.positions)
        self.rows.index_copy_(0, index, torch.cat((output.aux, output.hidden), 1))


Tokens = Sequence[int]
Say = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Asked:
    """A prompt, and how it is answered."""

    prompt: Tokens
    sampling: SamplingParams


class _Kept:
    """An outlet that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: ToWorker | ToFrontend) -> None:
        self.messages.append(message)

    def close(self) -> None:
        """Nothing is open."""

    def taken(self) -> list[Any]:
        """What has come since the last call."""
        messages, self.messages = self.messages, []
        return messages


class _NoInbox:
    """The scheduler is handed its messages."""

    def drain(self) -> list[Any]:
        return []

    async def recv(self) -> Any:
        raise AssertionError("this scheduler's loop does not run by itself")

    def close(self) -> None:
        """Nothing is open."""


class LocalEngine:
    """Target, worker and scheduler. `target` is loaded; `max_len`: of a request, its answer included."""

    def __init__(
        self, settings: Settings, ring_for: Callable[[LoadedTarget], FeatureRing], say: Say = lambda *_: None
    ) -> None:
        """Load, warm up, capture. Raises: ConfigError, CheckpointError."""
        place = prepare_place(settings)
        models = load_models(settings, place, lambda done, total: say("loading weights", done, total))
        self.target = models.target
        self.ring = ring_for(models.target)
        models = replace(models, proposer=self.ring)
        geometry = settle_geometry(settings, models, place)
        self.max_len = geometry.max_len
        self._executor = build_executor(models, geometry, place, attention=settings.attention)
        say("warming up", 0, 0)
        _prepare(settings, self._executor, geometry)
        self._captured = self._executor.runner
        self._plans, self._replies = _Kept(), _Kept()
        self._scheduler = build_scheduler(
            worker_ready(geometry, models, self._executor, ChunkSize(geometry.max_chunk, 0)),
            settings.scheduler,
            replaced(settings.cache, prefix_cache=False),
            Links(_NoInbox(), self._plans, self._replies),
        )
        self._most_open = 2 * geometry.num_slots
        self._flight: deque[StepHandle] = deque()
        self._num_asked = 0

    def close(self) -> None:
        """Nothing is asked any more."""
        self._executor.close()

    def answers(
        self, asked: Iterable[Asked], stop_ids: tuple[int, ...], until: float = math.inf
    ) -> Iterator[tuple[int, list[int]]]:
        """Each answer with its place in `asked`, as they end; of a request that is refused, an empty one.

        `until` [s, time.monotonic()]: then those that are open end where they are, and no other begins.
        """
        first, waiting, answers = self._num_asked, iter(asked), dict[int, list[int]]()
        self._executor.use(self._captured)
        while True:
            if time.monotonic() > until:
                waiting = iter(())
                self._scheduler.take([Abort(uid, AbortReason.SHUTDOWN) for uid in answers])
            for each in islice(waiting, self._most_open - len(answers)):
                answers[self._num_asked] = []
                self._scheduler.take([self._admit(self._num_asked, each.prompt, each.sampling, stop_ids)])
                self._num_asked += 1
            if not answers:
                break
            for uid in self._turn(answers, {}):
                yield uid - first, answers.pop(uid)
        self._settle()

    def states(self, samples: Sequence[Tokens], begin: int, length: int) -> None:
        """Write the hidden states of samples into the ring: sample b's begin at row `begin + b * length`.

        Step by step: what is captured for windows of one leaves the proposer out.
        """
        self._executor.use(self._executor.eager)
        first, once = self._num_asked, SamplingParams(max_new_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        self._num_asked += len(samples)
        bases = {first + place: begin + place * length for place in range(len(samples))}
        answers: dict[int, list[int]] = {uid: [] for uid in bases}
        self._scheduler.take([self._admit(uid, samples[uid - first], once, ()) for uid in bases])
        while answers:
            for uid in self._turn(answers, bases):
                del answers[uid]
        self._settle()

    def _admit(self, uid: int, prompt: Tokens, sampling: SamplingParams, stop_ids: tuple[int, ...]) -> Admit:
        return Admit(uid, array("i", prompt).tobytes(), sampling, stop_ids, time.monotonic())

    def _turn(self, answers: Mapping[int, list[int]], bases: Mapping[int, int]) -> list[int]:
        """Launch what is planned, settle the oldest step, and add what it gave. Returns the requests that ended."""
        self._scheduler.plan_ahead()
        self._launch(bases)
        if self._flight:
            self._scheduler.take([self._flight.popleft().wait()])
            self._launch(bases)
        self._scheduler.send_replies()
        ended: list[int] = []
        for message in self._replies.taken():
            if isinstance(message, Refused):
                answers[message.uid].clear()
                ended.append(message.uid)
            elif isinstance(message, TokenDeltas):
                for uid, tokens, finish in zip(message.uids, message.tokens, message.finishes, strict=True):
                    answers[uid].extend(tokens)
                    if finish is not None:
                        ended.append(uid)
        return ended

    def _launch(self, bases: Mapping[int, int]) -> None:
        for plan in self._plans.taken():
            assert isinstance(plan, StepPlan), "a scheduler without features sends plans alone"
            self.ring.place({slot: bases.get(reset.uid, NOWHERE) for slot, reset in plan.resets.items()})
            self._executor.launch(plan, self._flight.append)

    def _settle(self) -> None:
        """Let the steps end that are in flight; nothing waits."""
        while self._flight:
            self._scheduler.settle(self._flight.popleft().wait())
        self._replies.taken()


def _prepare(settings: Settings, executor: Executor, geometry: Geometry) -> None:
    sizes = settings.graph_batch_sizes
    if settings.model.device == "cpu":
        warm_up(executor, geometry, (), FEW_TOKENS)
        return
    with precompiling(settings, executor, geometry):
        warm_up(executor, geometry, cuda_prompt_lengths(geometry), decodes=not sizes)
        capture_graphs(executor, geometry, sizes)
        if sizes:
            run_uncaptured(executor, geometry)
    torch.cuda.synchronize()


def refuse_ranks(ranks: int) -> None:
    """Raises: ConfigError."""
    if ranks > 1:
        raise ConfigError("tp_size", f"train-draft runs on one device, got {ranks}; use 1")

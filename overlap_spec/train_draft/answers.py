"""The engine in this process: the scheduler's loop and the worker's executor, without sockets and other processes.

It answers prompts by plain decoding. Then it reads answered prompts again, as prompts, and their hidden states go to
the ring: the answers themselves were decoded in another order, and are read several times.

Hidden states leave the worker through the ring itself: a proposer that guesses nothing and keeps what it is shown.

Methods give the worker their proposer, and the target keeps the outputs of the layers that a proposer names. So the
worker needs to know nothing of training. Rows go to the ring by the place of their request in it:

    row of a request's token i  ->  ring[base of its slot + i];  of a request without a base  ->  the last row

The base of each slot is on the device, so that captured steps write too. The ring is written again when the training
step that reads it has been launched: both are in one stream.
"""

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch
from msgspec.structs import replace as replaced
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.messages import Abort, AbortReason, Admit, Refused, SamplingParams, StepPlan, TokenDeltas
from overlap_spec.models.interfaces import DraftProfile, LoadedTarget, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.scheduler.build import build_scheduler
from overlap_spec.scheduler.loop import Links
from overlap_spec.speculative.drafts import EngineShape, NoProposer
from overlap_spec.speculative.interfaces import Prompts
from overlap_spec.worker.build import build_executor, load_models, prepare_place
from overlap_spec.worker.startup.geometry import settle_geometry
from overlap_spec.worker.startup.step_times import ChunkSize
from overlap_spec.worker.startup.warmup import prepare
from overlap_spec.worker.step import StepHandle
from overlap_spec.worker.worker_actor import worker_ready

NOWHERE = -1
READ = SamplingParams(max_new_tokens=1, temperature=0.0, seed=0, ignore_eos=True)  # a sample, for its hidden states


class FeatureRing(NoProposer):
    """Aux hidden states and the final one of so many rows: the proposer, and what is attached (`LoadedProposer`).

    Shapes: rows [N + 1, (n + 1) * H], bases [S + 1] i64.
    """

    def __init__(self, aux_layers: tuple[int, ...], hidden_size: int, num_rows: int) -> None:
        self.profile = DraftProfile(aux_layers=aux_layers)
        self.num_rows = num_rows
        self.sizes = [len(aux_layers) * hidden_size, hidden_size]
        self._known: dict[int, int] = {}  # what the device has, by slot

    def attach(self, cache: KVCache, shape: EngineShape) -> "FeatureRing":
        """Take the ring's memory."""
        self.rows = torch.zeros(self.num_rows + 1, sum(self.sizes), dtype=shape.dtype, device=shape.device)
        self.bases = torch.full((shape.num_rows,), NOWHERE, device=shape.device)
        return self

    def place(self, bases: Mapping[int, int]) -> None:
        """Requests take slots, and their rows go there from now on; `NOWHERE`: they are not kept. Sync: never."""
        changed = {slot: base for slot, base in bases.items() if self._known.get(slot, NOWHERE) != base}
        if changed:
            self._known |= changed
            slots, places = (torch.tensor([*each], device=self.bases.device) for each in (changed, changed.values()))
            self.bases[slots] = places

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Any:
        """Write the rows of prompts. Sync: never."""
        assert rows.row_starts is not None, "chunks say where their rows are"
        places = torch.ones_like(rows.positions).cumsum(0)
        chunks = torch.searchsorted(rows.row_starts[1:].long(), places)
        bases = self.bases[prompts.chunk_slots[chunks]]
        index = torch.where(bases == NOWHERE, len(self.rows) - 1, bases + rows.positions)
        self.rows.index_copy_(0, index, torch.cat((output.aux, output.hidden), 1))


Tokens = Sequence[int]
Asked = tuple[Tokens, SamplingParams]  # a prompt, and how it is answered
Say = Callable[[str, int, int], None]


class LocalEngine:
    """Target, worker and scheduler. `target` is loaded; `max_len`: of a request, its answer included."""

    def __init__(
        self, settings: Settings, ring_for: Callable[[LoadedTarget], FeatureRing], say: Say = lambda *_: None
    ) -> None:
        """Load, warm up, capture. Raises: ConfigError, CheckpointError."""
        place = prepare_place(settings)
        models = load_models(settings, place, lambda done, total: say("loading weights", done, total))
        self.target, self.ring = models.target, ring_for(models.target)
        models = replace(models, proposer=self.ring)
        geometry = settle_geometry(settings, models, place)
        self.max_len, self._most_open = geometry.max_len, 2 * geometry.num_slots
        self._executor = build_executor(models, geometry, place, attention=settings.attention)
        prepare(settings, self._executor, geometry, say)
        self._captured = self._executor.runner
        ready = worker_ready(geometry, models, self._executor, ChunkSize(geometry.max_chunk, 0))
        # The scheduler's loop does not run: nothing else is asked of a link.
        links = Links(cast(Any, self), self, self)
        cache = replaced(settings.cache, prefix_cache=False)
        self._scheduler = build_scheduler(ready, settings.scheduler, cache, links)
        self._flight: deque[StepHandle] = deque()
        self._num_asked = 0
        self._bases: dict[int, int] = {}  # of requests whose rows are kept, by uid
        self._open: dict[int, tuple[Tokens, list[int]]] = {}  # prompts and answers, by uid
        self._ended: list[int] = []

    def close(self) -> None:
        """Nothing is asked any more."""
        self._executor.close()

    def states(self, samples: Sequence[Tokens], length: int) -> tuple[Tensor, ...]:
        """Hidden states of samples, `length` rows of each, no more than the ring has; the next call writes there again.

        Step by step: what is captured for windows of one leaves the proposer out.
        Shapes: -> aux [B, L, n * H], hidden [B, L, H], views.
        """
        self._bases = {self._num_asked + place: place * length for place in range(len(samples))}
        for _ in self.answers(((tokens, READ) for tokens in samples), captured=False):
            pass
        rows = self.ring.rows[: len(samples) * length].view(len(samples), length, -1)
        return torch.split(rows, self.ring.sizes, 2)

    def answers(
        self, asked: Iterable[Asked], stop_ids: tuple[int, ...] = (), until: float = math.inf, captured: bool = True
    ) -> Iterator[tuple[int, Tokens, list[int]]]:
        """Places in `asked`, prompts and their answers, as they end; of a request that is refused, an empty one.

        `until` [s, time.monotonic()]: then those that are open end where they are, and no other begins.
        """
        self._executor.use(self._captured if captured else self._executor.eager)
        first, waiting = self._num_asked, iter(asked)
        while True:
            if time.monotonic() > until:
                waiting = iter(())
                self._scheduler.take([Abort(uid, AbortReason.SHUTDOWN) for uid in self._open])
            for tokens, sampling in islice(waiting, self._most_open - len(self._open)):
                uid, prompt = self._num_asked, array("i", tokens).tobytes()
                self._open[uid], self._num_asked = (tokens, []), uid + 1
                self._scheduler.take([Admit(uid, prompt, sampling, stop_ids, time.monotonic())])
            if not self._open and not self._flight:
                return
            self._scheduler.plan_ahead()
            if self._flight:
                self._scheduler.take([self._flight.popleft().wait()])
            self._scheduler.send_replies()
            ended, self._ended = self._ended, []
            for uid in ended:
                yield uid - first, *self._open.pop(uid)

    def send(self, message: object) -> None:
        """Both ends of the scheduler's links. A plan is launched at once: the scheduler plans ahead."""
        if isinstance(message, StepPlan):
            self.ring.place({slot: self._bases.get(reset.uid, NOWHERE) for slot, reset in message.resets.items()})
            self._executor.launch(message, self._flight.append)
        elif isinstance(message, Refused):
            self._open[message.uid][1].clear()
            self._ended.append(message.uid)
        elif isinstance(message, TokenDeltas):
            for uid, tokens, finish in zip(message.uids, message.tokens, message.finishes, strict=True):
                self._open[uid][1].extend(tokens)
                if finish is not None:
                    self._ended.append(uid)

"""The whole engine in one process: frontend service and scheduler in an event loop, worker beside it, tiny models.

A test sends messages as clients do and reads each request's rows. After every event that the scheduler handles, its
invariants are checked from scratch (`ring_links.py`).
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from overlap_spec import features
from overlap_spec.config import (
    AcceptSettings,
    AdaptSettings,
    AttentionSettings,
    AuditSettings,
    CacheSettings,
    EngineConfig,
    SchedulerSettings,
    Settings,
    SpecSettings,
)
from overlap_spec.features import absent_fields, without_absent
from overlap_spec.frontend.codec import Codec
from overlap_spec.frontend.hooks import Hooks, attached
from overlap_spec.frontend.request_checks import RequestChecks
from overlap_spec.frontend.service import FrontendService
from overlap_spec.messages import (
    Cancel,
    Generate,
    SamplingParams,
    Shutdown,
    StepCosts,
    ToFrontend,
    TokenPrompt,
    ToScheduler,
    TwoPartSizes,
)
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.parallel import WHOLE, Rank
from overlap_spec.runtime.step_link import SpinPolicy
from overlap_spec.runtime.tracing import NO_TRACE, SCHEDULER, Record, read_records, recorder
from overlap_spec.scheduler.build import build_scheduler
from overlap_spec.scheduler.loop import Links
from overlap_spec.speculative.drafts import ChainDraft, NoDraft, SmallModelDraft, TreeDraft
from overlap_spec.speculative.interfaces import ABSORBED_ROWS
from overlap_spec.speculative.methods import method_named, method_of
from overlap_spec.speculative.proposers.block import BlockDraft
from overlap_spec.speculative.proposers.parallel import ParallelDraft
from overlap_spec.speculative.proposers.tree import Branching
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.capture import CudaRecorder
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.loop import Worker
from overlap_spec.worker.startup.geometry import Geometry, LoadedModels
from overlap_spec.worker.startup.step_times import ChunkSize
from overlap_spec.worker.startup.warmup import capture_graphs, cuda_prompt_lengths, run_uncaptured, warm_up
from overlap_spec.worker.step import CHUNKS
from overlap_spec.worker.worker_actor import worker_ready
from support.fake_settings import fake_settings
from support.graph_runners import CountingRunner, counted
from support.late_grammars import delay_grammars
from support.memory_link import MemoryLink
from support.own_processors import OWN_PROCESSORS
from support.random_chunks import RandomChunks
from support.random_widths import RandomWidths
from support.ranked_models import NotedResults, RankedModels, SharedPlans, of_ranks
from support.replayed_parts import ReplayedParts
from support.ring_links import CLIENT, Answer, FromThread, MemoryClients, PlanQueue, WatchedInbox, WatchedPlans
from support.scheduler_features import audits_of, with_features
from support.tiny.families import TINY_FAMILIES
from support.tiny.grammars import grammar_checks, tiny_tokenizer_dir
from support.tiny.grouped import GROUPED, grouped_kernel, with_grouped_linears
from support.tiny.methods import KNOWN_METHODS, MULTI_LAYER
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_target
from support.tiny.quantized import FAMILIES_IN_FORMATS, quantised

if TYPE_CHECKING:
    from overlap_spec.features.audit.frontend import Auditor

TIMEOUT_S = 30.0
LEAVE_S = 2.0  # for a rank that is told to stop
KV_SCALE = 0.003  # of KV pages of 8 bits: so small that many values are clamped, and tokens depend on the rounding


def tiny_loaded(
    seed: int,
    num_steps: int,
    dtype: torch.dtype = torch.float64,
    place: torch.device = CPU,
    method: str = "EAGLE3",
    family: str = "llama",
    topk: int = 1,
    convert: Callable[[LoadedTarget], LoadedTarget] = lambda target: target,
    rank: Rank = WHOLE,
    **shape: Any,
) -> LoadedModels:
    """A tiny target with a `method` for `num_steps` guesses, or trees of so many levels; 0 steps: plain decoding.

    `convert` is applied to the target before a draft shares its parts; `rank`: of several, which part of the target;
    `shape`: of the target.
    """
    kernel = None
    if family == GROUPED:
        family, convert, kernel = "llama", with_grouped_linears, grouped_kernel()
    name, kind, sizes = FAMILIES_IN_FORMATS.get(family, (family, None, {}))
    checkpoint = tiny_target(seed, **TINY_FAMILIES[name] | sizes | shape)
    stored = checkpoint if kind is None else quantised(checkpoint, kind)[0]
    target = convert(load_tiny_target(stored, dtype, place, rank))
    return replace(tiny_models(checkpoint, target, seed + 1, num_steps, method, topk), kernel=kernel)


def tiny_models(
    checkpoint: TinyCheckpoint, target: LoadedTarget, seed: int, num_steps: int, method: str, topk: int = 1
) -> LoadedModels:
    """A loaded target with a draft. `checkpoint`: what the draft is made for; `seed`: of the draft."""
    if num_steps == 0:
        return LoadedModels(target, NoDraft(), method_named("NONE"))
    name, load = KNOWN_METHODS[method]
    without_absent(EngineConfig(speculative_algorithm=name))  # refused by name if its feature is not there
    draft = load(seed, checkpoint, target, num_steps)
    spec = SpecSettings(name, None, num_steps, 1, num_steps + 1, multi_layer=method in MULTI_LAYER)
    record = method_of(spec, features.listed(features.WORKER, "METHODS"))
    if topk > 1 and isinstance(draft, ChainDraft | SmallModelDraft):
        draft = TreeDraft(draft, Branching(num_steps, topk))
    elif topk > 1 and isinstance(draft, BlockDraft | ParallelDraft):
        draft = replace(draft, tree=Branching(num_steps, topk))
    return LoadedModels(target, draft, record)


@dataclass(frozen=True)
class RingConfig:
    """What varies between rings."""

    method: str = "EAGLE3"  # one of `EVERY_METHOD`
    family: str = "llama"  # the target's: one of `TINY_FAMILIES` or `FAMILIES_IN_FORMATS`, or `GROUPED`
    num_steps: int = 3
    topk: int = 1  # guesses are trees where it is more
    num_draft_tokens: int | None = None  # width of the window; None: of a chain, or of a tree of some size
    depth: int = 2
    page_size: int = 4
    num_pages: int = 200
    num_slots: int = 4
    chunk_tokens: int = 16
    chunk_pairs: int = 0
    max_len: int = 160
    prefix_cache: bool = True
    dtype: torch.dtype = torch.float64
    place: torch.device = CPU
    graph_batch_sizes: tuple[int, ...] = ()
    warm: bool = False  # warmed up before it serves, as the worker process is
    accept: AcceptSettings = AcceptSettings()  # how guesses are judged
    attention: AttentionSettings | None = None  # what runs it; None: what is fastest
    processor: str | None = None  # one of `OWN_PROCESSORS`
    widths_seed: int | None = None  # steps of any width, drawn from a generator with this seed; None: a whole window
    audit: AuditSettings = AuditSettings()
    adapt: AdaptSettings = AdaptSettings()  # whether the draft learns
    audit_slots: int = 3
    audit_share: int = 3  # of so many steps one is an audit's, while requests run
    grammars: bool = False  # requests may have grammars
    markers: tuple[str, ...] = ()  # further special tokens of the frontend that grammars have
    proposes_forced: bool = True  # what a grammar leaves no choice about is guessed
    ranks: int = 1  # that features think there are: of `RankedModels`, all of them
    chunks_seed: int | None = None  # prompts are cut anywhere, by a generator with this seed; None: where they must be
    schedule_policy: str = "fcfs"
    late_grammars: float = 0.0  # s: every grammar is slow, takes so much longer, and no step waits for one
    trace_dir: Path | None = None  # where traces are written
    step_costs: StepCosts = StepCosts()  # steps are as wide as these make best; up to a whole window
    kv_dtype: torch.dtype | None = None  # of KV pages; None: `dtype`
    num_snapshots: int = 0  # of recurrent states
    state_chunk: int | None = None  # at whose multiples these are taken; None: at the layers' own
    snapshot_interval: int = 256  # tokens between two of a prompt
    deterministic: bool = False  # of layers that recur: what scheduler and graphs are told

    @property
    def shape(self) -> dict[str, Any]:
        """What the target's checkpoint has for these KV pages."""
        return {} if self.kv_dtype is None else {"kv_scale": KV_SCALE}

    @property
    def width(self) -> int:
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        return 1 + (self.topk + 2 * (self.num_steps - 1) if self.topk > 1 and self.num_steps else self.num_steps)

    def geometry(self) -> Geometry:
        width = self.width
        any_width = tuple(range(1, width)) if self.widths_seed is not None else ()
        return Geometry(
            self.num_slots,
            width,
            self.page_size,
            self.max_len,
            self.num_pages,
            self.chunk_tokens,
            self.dtype,
            any_width or self.step_costs.widths[:-1],
            placed_slots=self.audit_slots if self.audit.rate else 0,
            placed_batches=self.placed_batches,
            kv_dtype=self.kv_dtype,
            two_parts=self.two_parts,
            most_deferred=ABSORBED_ROWS + 2,  # few: rings get full, and are absorbed in two steps
            num_snapshots=self.num_snapshots,
            has_drawn=self.deterministic,
        )

    @property
    def placed_batches(self) -> tuple[int, ...]:
        """What steps of audits are padded to, those of controls last."""
        sizes = {max(self.audit_slots // 4, 1), self.audit_slots, 2 * self.audit_slots}
        return tuple(sorted(sizes)) if self.audit.rate else ()

    @property
    def two_parts(self) -> TwoPartSizes | None:
        """What is captured of mixed steps, with graphs; not every step fits."""
        if not self.graph_batch_sizes:
            return None
        batches = tuple(sorted({min(2, self.num_slots), self.num_slots}))
        return TwoPartSizes(self.width, CHUNKS, batches, ((16, 48),) * len(batches))


class Ring:
    """A running engine. `start` sends a request and returns its answer, which fills while the loop runs."""

    def __init__(self, all_models: LoadedModels | RankedModels, config: RingConfig, codec: Codec) -> None:
        geometry = config.geometry()
        self._config = config
        self._models = of_ranks(all_models)
        models = self._models.parts[0]
        self.ready = asyncio.Event()
        self.counted: CountingRunner  # once it is ready
        self.executors = [self._built(each, rank) for rank, each in enumerate(self._models.parts)]
        self.executor = self.executors[0]
        self.to_scheduler: MemoryLink[ToScheduler] = MemoryLink(ToScheduler)
        queues = [PlanQueue() for _ in self.executors]
        self.to_worker = SharedPlans(queues)
        self.to_frontend: MemoryLink[ToFrontend] = MemoryLink(ToFrontend)
        self.inbox = WatchedInbox(self.to_scheduler, self._device_lengths if config.place == CPU else None)
        self.plans = WatchedPlans(self.to_worker, self.inbox.sent)
        back = FromThread(self.to_scheduler, self.inbox.sent)
        trace_dir = None if config.trace_dir is None else str(config.trace_dir)
        self.traces = [recorder(track, trace_dir) for track in ("worker", SCHEDULER)]
        self.results = [NotedResults(None if rank else back) for rank in range(len(queues))]
        self.workers = [
            Worker(executor, queue, results, SpinPolicy(0.0), NO_TRACE if rank else self.traces[0])
            for rank, (executor, queue, results) in enumerate(zip(self.executors, queues, self.results, strict=True))
        ]
        settings = SchedulerSettings(
            *(config.num_slots, config.depth, config.chunk_tokens, 0),
            schedule_policy=config.schedule_policy,
            deterministic=config.deterministic,
        )
        cache = CacheSettings(
            config.page_size, None, 0.9, config.prefix_cache, snapshot_interval=config.snapshot_interval
        )
        links = Links(self.inbox, self.plans, self.to_frontend, self.traces[1])
        chunk = ChunkSize(config.chunk_tokens, config.chunk_pairs)
        ready = worker_ready(geometry, models, self.executor, chunk, costs=config.step_costs)
        if config.state_chunk is not None:
            ready = msgspec.structs.replace(ready, state_chunk=config.state_chunk)
        scheduler = build_scheduler(ready, settings, cache, links)
        self.scheduler = with_features(scheduler, config.audit, config.adapt)
        if config.audit.rate:
            audits_of(self.scheduler).share = config.audit_share
        if config.widths_seed is not None:
            self.scheduler.planner.widths.policy = RandomWidths(config.widths_seed, geometry.width)
        if config.chunks_seed is not None:
            self.scheduler.planner.chunks = RandomChunks(config.chunks_seed, self.scheduler.limits)
        self.inbox.scheduler = self.scheduler
        self.clients = MemoryClients()
        checks = RequestChecks(codec.eos_token_ids, 1000, 0, trusts_templates=True)
        checks.limits = self.scheduler.limits.engine_limits()
        self.frontend = FrontendService(codec, checks, self.to_scheduler, self.clients, lambda message: None)
        self.frontend.attach(self._frontend_hooks(models.target.vocab_size))
        for take in self.frontend.hooks.message:
            take(checks.limits)

    def _built(self, models: LoadedModels, rank: int) -> Executor:
        config = self._config
        executor = build_executor(
            models, config.geometry(), config.place, config.accept, attention=config.attention,
            own_processors=() if config.processor is None else (OWN_PROCESSORS[config.processor].in_tensors,),
            settings=worker_settings(config, models.target.vocab_size), rank=rank,
        )  # fmt: skip
        if config.late_grammars:
            delay_grammars(executor, config.late_grammars)
        return executor

    def assert_ranks_agree(self) -> None:
        """All ranks committed the same tokens in the same steps, and left the same slots. The ring has ended."""
        for executor, results in zip(self.executors[1:], self.results[1:], strict=True):
            assert results.noted == self.results[0].noted, "a rank answered something else, or less"
            for name in ("length", "window", "parents", "page_table"):
                assert torch.equal(getattr(executor.slots, name), getattr(self.executor.slots, name)), name

    def _frontend_hooks(self, vocab_size: int) -> Hooks:
        """Those that an engine has; all rings check grammars in one process."""
        settings = frontend_settings(self._config)
        hooks = attached(features.modules(features.FRONTEND), self.frontend.parts(settings), absent_fields())
        if not self._config.grammars:
            return hooks
        from overlap_spec.features.grammar.frontend import GrammarHook

        checked = GrammarHook(grammar_checks(vocab_size, self._config.markers))
        return Hooks(checked if isinstance(hook, GrammarHook) else hook for hook in hooks.all)

    @property
    def auditor(self) -> "Auditor":
        """What has audited the ring's requests so far."""
        from overlap_spec.features.audit.frontend import AuditHook

        return next(hook.auditor for hook in self.frontend.hooks.all if isinstance(hook, AuditHook))

    def written_trace(self) -> list[Record]:
        """What scheduler and worker have recorded. Nothing is in flight."""
        self.executor.hooks.by_name["tracing"].close()
        for trace in self.traces:
            trace.write()
        assert self._config.trace_dir is not None
        return read_records(self._config.trace_dir)

    def start(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> Answer:
        """Send a request."""
        answer = self.clients.answers[request_id] = Answer()
        ids = b"".join(token.to_bytes(4, "little", signed=True) for token in prompt)
        self.clients.said.put_nowait((CLIENT, Generate(request_id, TokenPrompt(ids), sampling)))
        return answer

    def cancel(self, request_id: str) -> None:
        """Abort a request."""
        self.clients.said.put_nowait((CLIENT, Cancel(request_id)))

    async def ask(self, prompt: list[int], sampling: SamplingParams) -> Answer:
        """One request to its end."""
        answer = self.start(f"r{len(self.clients.answers)}", prompt, sampling)
        await asyncio.wait_for(answer.done.wait(), TIMEOUT_S)
        return answer

    async def idle(self) -> None:
        """Wait until nothing runs, no step is in flight and no request is left to audit."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.scheduler.inflight or not self.scheduler.queues.idle or self._audits():
                await asyncio.sleep(0.001)

    def _audits(self) -> int:
        """Requests that are still to be audited."""
        return self.auditor.report().figures.backlog if self._config.audit.rate else 0

    def _device_lengths(self) -> dict[int, int]:
        """The root is a token whose KV is yet to be written."""
        return {slot: length + 1 for slot, length in enumerate(self.executor.slots.length.tolist())}

    async def serve(self) -> None:
        """Run all three actors until cancelled; an actor's exception ends them all."""
        async with asyncio.TaskGroup() as group:
            for rank in range(len(self.workers)):
                group.create_task(self._work(rank))
            group.create_task(self.scheduler.run())
            group.create_task(self.frontend.serve(self.to_frontend))

    def _prepare_and_run(self, rank: int, loop: asyncio.AbstractEventLoop) -> None:
        """All in one thread, as in the worker process: a BLAS keeps its workspace by thread."""
        geometry, executor = self._config.geometry(), self.executors[rank]
        if self._config.warm:
            warm_up(executor, geometry, cuda_prompt_lengths(geometry))
        recorder = ReplayedParts if self._config.place == CPU else CudaRecorder
        capture_graphs(executor, geometry, self._config.graph_batch_sizes, recorder)
        runner = counted(executor)
        if self._config.graph_batch_sizes:
            run_uncaptured(executor, geometry)
        if not rank:
            self.counted = runner
            loop.call_soon_threadsafe(self.ready.set)
        try:
            self.workers[rank].run()
        except BaseException:
            self._models.abort()
            raise

    async def _work(self, rank: int) -> None:
        """A rank's worker, in a thread, which is told to stop when this is cancelled."""
        loop = asyncio.get_running_loop()
        working = asyncio.create_task(asyncio.to_thread(self._prepare_and_run, rank, loop))
        try:
            await asyncio.shield(working)
        finally:
            self.to_worker.queues[rank].send(Shutdown(False))
            await asyncio.wait({working}, timeout=LEAVE_S)
            if working.done():
                await working
            else:  # the rank waits for the sums of a rank that has left the step
                self._models.abort()
                with suppress(threading.BrokenBarrierError):
                    await working


def frontend_settings(config: RingConfig) -> Settings:
    """What features of the frontend go by."""
    settings = fake_settings()
    model = msgspec.structs.replace(settings.model, dtype=str(config.dtype).removeprefix("torch."))
    return msgspec.structs.replace(settings, model=model, audit=config.audit, adapt=config.adapt)


def worker_settings(config: RingConfig, vocab_size: int) -> Settings:
    """What features of the worker go by."""
    settings = frontend_settings(config)
    trace_dir = None if config.trace_dir is None else str(config.trace_dir)
    settings = msgspec.structs.replace(settings, proposes_forced=config.proposes_forced, trace_dir=trace_dir)
    settings = msgspec.structs.replace(settings, ranks=config.ranks)
    if config.grammars:
        files = msgspec.structs.replace(
            settings.model.files, tokenizer_dir=tiny_tokenizer_dir(vocab_size, config.markers)
        )
        model = msgspec.structs.replace(settings.model, files=files)
        settings = msgspec.structs.replace(settings, model=model, skip_tokenizer_init=False)
    return msgspec.structs.replace(settings, spec=msgspec.structs.replace(settings.spec, accept=config.accept))


@asynccontextmanager
async def running(models: LoadedModels | RankedModels, config: RingConfig, codec: Codec) -> AsyncIterator[Ring]:
    """A ring that serves while the block runs. An actor's failure surfaces at the end of the block."""
    ring = Ring(models, config, codec)
    actors = asyncio.create_task(ring.serve())
    block = asyncio.current_task()
    assert block is not None
    actors.add_done_callback(lambda task: None if task.cancelled() else block.cancel())
    try:
        await ring.ready.wait()  # no other work may run on the device during a capture
        yield ring
    except asyncio.CancelledError:
        if actors.done():
            actors.result()  # raises what went wrong
        raise
    finally:
        actors.cancel()
        await asyncio.gather(actors, return_exceptions=True)
        for executor in ring.executors:
            executor.close()

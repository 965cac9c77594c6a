"""Runs every kind of step once before the engine reports ready, and measures how long prompts and steps take.

Warm-up plans are ordinary plans on slot 0 and the dummy page, so they leave nothing behind: the next owner resets the
slot, and no request reads the dummy page.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from overlap_spec.messages import (
    NO_TOKEN,
    JoinedSizes,
    LogProbParams,
    Phase,
    PrefillCosts,
    ResetSlot,
    SamplingParams,
    SlotWork,
    StepCosts,
    StepPlan,
)
from overlap_spec.models.layers.rehearsal import rehearsing
from overlap_spec.spec.chunk_runs import LONG_CHUNK
from overlap_spec.worker.audit import GraphAuditor
from overlap_spec.worker.decode import Decoder
from overlap_spec.worker.decode_graphs import GraphDecoder
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.handle import StepHandle
from overlap_spec.worker.joined_graphs import GraphJoiner
from overlap_spec.worker.prefill import Prefiller
from overlap_spec.worker.prefill_graphs import GraphPrefiller, captured_shapes
from overlap_spec.worker.sizing.geometry import Geometry
from overlap_spec.worker.step_graphs import LAYERS_APART, CudaRecorder, GraphRecorder

CHUNK_SECONDS = 0.5  # the longest that a prefill step on a CPU may delay the other requests
PROBE_TOKENS = 64
PROBE_CONTEXT = 4096  # two chunks are timed, one with so many tokens before it: most of its time is attention
PROBES = 3  # how often the other one is timed, at most
PREFILL_PROBES = (1024, 4096, 16384)  # on CUDA: tokens of a short chunk, of a long one, and before another short one
AGREEING = 1.1  # no more once two times differ by at most this factor
FEW_TOKENS = 16  # in the prompts that warm up a CPU: nothing is compiled there
SMALL_STEP = 2048  # rows; tensors of larger steps fit into the memory that the longest step has left
MIN_CHUNK = 16
COST_CONTEXT = 256  # tokens before the root of the decode steps that are timed
COST_ROUNDS = 2
QUEUED_PROMPTS = 2  # on CUDA so many prefill steps are queued, and the faster counts
QUEUED_STEPS = 8  # on CUDA so many steps are queued, and their mean is taken
CPU_COST_SIZES = (1, 4)  # batch sizes that are timed on a CPU, where time grows in proportion beyond them

NOT_MEASURED = PrefillCosts()
GREEDY = SamplingParams(temperature=0.0, seed=0)
SAMPLED = SamplingParams(temperature=1.0, seed=0)
EVERYTHING = SamplingParams(
    temperature=1.0,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    min_new_tokens=1,
    repetition_penalty=1.1,
    logit_bias={1: 1.0},
    bad_word_ids=((2, 3),),
    seed=0,
    log_probs=LogProbParams(token_ids=(0,), prompt_from=0),
)  # compiles the kernels of every other kind of sampling too


class NotFinite(Exception):
    """The target's logits are NaN or infinite. `not_finite.py` finds out where they become so."""


def warm_up(
    executor: Executor,
    geometry: Geometry,
    prompt_lengths: tuple[int, ...] = (PROBE_TOKENS,),
    num_tokens: int = PROBE_TOKENS,
    decodes: bool = True,
) -> None:
    """Prefill and decode once in each variant: greedy, sampled, with everything; on CUDA at every width.

    `prompt_lengths`: greedy prompts that are run before, without layers that are alike. `num_tokens`: the length of the
    prompts of the variants. `decodes`: False where `capture_graphs` follows, which runs every decode step once.
    Raises: NotFinite if the target's logits after a prompt of a variant are NaN or infinite.
    """
    lengths = (min(length, geometry.max_len - 1) for length in prompt_lengths)
    with rehearsing():
        _run_all(executor, (_prefill(geometry, GREEDY, 0, length) for length in lengths))
    for sampling in (GREEDY, SAMPLED, EVERYTHING):
        _run_prompt(executor, geometry, sampling, num_tokens)
        if decodes:
            _warm_up_decoding(executor, geometry, sampling)
    if executor.masking is not None:
        executor.masking.warm_up()


def _run_prompt(executor: Executor, geometry: Geometry, sampling: SamplingParams, num_tokens: int) -> None:
    plan = _prefill(geometry, sampling, start=0, num_tokens=min(num_tokens, geometry.max_len - 1))
    if any(NO_TOKEN in run for run in executor.launch(plan).wait().tokens):
        raise NotFinite


def _warm_up_decoding(executor: Executor, geometry: Geometry, sampling: SamplingParams) -> None:
    for _ in range(2):
        _run(executor, StepPlan(0, Phase.DECODE, [SlotWork(slot=0)], geometry.width))
    for width in geometry.narrower if executor.slots.length.is_cuda else ():  # a CPU compiles nothing
        _run(executor, _prefill(geometry, sampling, start=0, num_tokens=1))
        _run(executor, StepPlan(0, Phase.DECODE, [SlotWork(slot=0)], width))
        late = [SlotWork(slot=0, deferred=int(width == 1))]
        _run(executor, StepPlan(0, Phase.DECODE, late, geometry.width, catch_up=width == 1))


def cuda_prompt_lengths(geometry: Geometry) -> tuple[int, ...]:
    """Prompt chunks that between them meet every attention tile and number of splits, and need the most memory."""
    return (1, 6, 16, PROBE_TOKENS, 256, 512, 1024, geometry.max_chunk)


@dataclass(frozen=True)
class Captures:
    """The graphs of decode and prefill steps; by the part of a step, how many there are and how long they took."""

    decoder: Decoder
    prefiller: Prefiller
    counts: Counter[str]
    seconds: dict[str, float]


def capture_graphs(
    executor: Executor,
    geometry: Geometry,
    batch_sizes: tuple[int, ...],
    make_recorder: Callable[[], GraphRecorder] = CudaRecorder,
    layers_apart: bool = LAYERS_APART,
) -> Captures:
    """Let decode and short prefill steps run as CUDA graphs from now on. Nothing may be in flight."""
    if not batch_sizes:
        return Captures(executor.decode_step, executor.prefill_step, Counter(), {})
    graphs, recorder = graph_steps(executor, geometry, batch_sizes, layers_apart), make_recorder()
    for steps in graphs.all:
        steps.capture(recorder)
    executor.use(graphs.decoder, graphs.prefiller, graphs.joiner)
    if graphs.auditor is not None:
        executor.audit_by(graphs.auditor)
    return Captures(graphs.decoder, graphs.prefiller, recorder.counts, recorder.seconds)


@dataclass(frozen=True)
class GraphSteps:
    """What replays the steps of an executor, to be captured."""

    decoder: GraphDecoder
    prefiller: GraphPrefiller
    joiner: GraphJoiner
    auditor: GraphAuditor | None

    @property
    def all(self) -> tuple[GraphDecoder | GraphPrefiller | GraphJoiner | GraphAuditor, ...]:
        """In the order of captures: those that need the most memory first."""
        steps = self.decoder, self.prefiller, self.joiner
        return steps if self.auditor is None else (*steps, self.auditor)


def graph_steps(
    executor: Executor, geometry: Geometry, batch_sizes: tuple[int, ...], layers_apart: bool = LAYERS_APART
) -> GraphSteps:
    """Decode steps of these sizes, prefill steps and audits, not captured yet."""
    slots, audit_step = executor.slots, executor.audit_step
    decoder = GraphDecoder(executor.decode_step, slots, geometry.step_widths, batch_sizes, layers_apart)
    shapes = captured_shapes(min(geometry.max_len, geometry.max_chunk), geometry.batch_rows, geometry.num_slots)
    prefiller = GraphPrefiller(executor.prefill_step, slots, shapes, layers_apart)
    joiner = GraphJoiner(executor.joined_step, slots, geometry.joined or JoinedSizes(geometry.width, 0))
    auditor = None if audit_step is None else GraphAuditor(audit_step, slots, audit_batches(geometry))
    return GraphSteps(decoder, prefiller, joiner, auditor)


def audit_batches(geometry: Geometry) -> tuple[int, ...]:
    """Batch sizes of audits that are captured: few, because a larger batch takes hardly longer."""
    if not geometry.num_audits:
        return ()
    return tuple(sorted({max(geometry.num_audits // 4, 1), geometry.num_audits, geometry.num_controls}))


def run_uncaptured(executor: Executor, geometry: Geometry) -> None:
    """Run steps that no graph holds, so that they take no memory later. Call it after `capture_graphs`.

    Steps of many sizes, because small tensors and large ones lie in memory of their own.
    """
    with rehearsing():
        _run_all(executor, _every_kind(geometry))
        _run_all(executor, (plan for plan in _every_size(geometry) if not executor.replays_prompts(plan)))


def _every_kind(geometry: Geometry) -> Iterator[StepPlan]:
    """The longest prompt, and as many as there can be."""
    yield _prefill(geometry, EVERYTHING, start=0, num_tokens=min(geometry.max_chunk, geometry.max_len - 1))
    for sampling in (GREEDY, SAMPLED, EVERYTHING):
        yield _prefill_all(geometry, sampling, _together(geometry), 1)


def _every_size(geometry: Geometry) -> Iterator[StepPlan]:
    """Prompts together and alone, up to the size from which on tensors fit into the memory of the longest prompt's."""
    slots, longest = _together(geometry), min(geometry.max_chunk, geometry.max_len - 1)
    for num_tokens in _growing(1, min(longest, min(SMALL_STEP, geometry.max_chunk) // len(slots))):
        yield _prefill_all(geometry, GREEDY, slots, num_tokens)
    for num_tokens in _growing(PROBE_TOKENS, min(longest, SMALL_STEP)):
        yield _prefill(geometry, GREEDY, start=0, num_tokens=num_tokens)


def _together(geometry: Geometry) -> range:
    """The slots whose prompts one step can hold."""
    return range(min(geometry.num_slots, geometry.max_chunk))


def _growing(first: int, last: int) -> Iterator[int]:
    """Up to `last`, each a quarter more than the one before."""
    while first <= last:
        yield first
        first += max(first // 4, 1)


@dataclass(frozen=True)
class ChunkSize:
    """How much prompt a prefill step may hold, and how long it takes (`WorkerReady`)."""

    tokens: int
    pairs: int
    costs: PrefillCosts = NOT_MEASURED


def measure_chunk(executor: Executor, geometry: Geometry) -> ChunkSize:
    """Size prefill steps so that one takes at most half a second, by timing one at the start and one far behind it.

    The difference between the two is attention to the keys before the chunk. Call it after `warm_up`.
    """
    num_tokens = min(PROBE_TOKENS, geometry.max_len - 1)
    far = min(geometry.max_len - 1 - num_tokens, PROBE_CONTEXT)
    near_s = _agreed(lambda: _timed(executor, _prefill(geometry, GREEDY, 0, num_tokens)))
    far_s = _timed(executor, _prefill(geometry, GREEDY, far, num_tokens))  # once: a long one is less disturbed
    fitting = int(CHUNK_SECONDS / near_s * num_tokens)
    tokens = max(MIN_CHUNK, geometry.page_size, min(fitting - fitting % geometry.page_size, geometry.max_chunk))
    attention_s = max(far_s - near_s, 0.0)
    costs = PrefillCosts(0.0, near_s / num_tokens, attention_s / (num_tokens * far) if far else 0.0)
    return ChunkSize(tokens, int(CHUNK_SECONDS / attention_s * num_tokens * far) if attention_s else 0, costs)


def measure_prefill(executor: Executor, geometry: Geometry, padded_rows: tuple[int, ...]) -> PrefillCosts:
    """Time prefill steps with others queued ahead: a short chunk, a long one, and a short one far from its start."""
    longest = min(geometry.max_chunk, geometry.max_len - 1)
    few, many = (min(size, longest) for size in PREFILL_PROBES[:2])
    far = min(PREFILL_PROBES[2], geometry.max_len - 1 - few)
    near_s = _prompt_seconds(executor, geometry, 0, few)
    pair_s = max(_prompt_seconds(executor, geometry, far, few) - near_s, 0.0) / (few * far) if far else 0.0
    if many == few:
        return PrefillCosts(0.0, near_s / few, pair_s, padded_rows)
    more_s = _prompt_seconds(executor, geometry, 0, many) - near_s - pair_s * (many**2 - few**2) / 2
    token_s = max(more_s / (many - few), near_s / few / 2)
    step_s = max(near_s - few * token_s - pair_s * few**2 / 2, 0.0)
    return _with_long_chunks(executor, geometry, PrefillCosts(step_s, token_s, pair_s, padded_rows))


def _with_long_chunks(executor: Executor, geometry: Geometry, costs: PrefillCosts) -> PrefillCosts:
    """Time the shortest chunk that attends by itself, far from its start, if there is room for one."""
    far = min(PREFILL_PROBES[2], geometry.max_len - 1 - LONG_CHUNK)
    if far <= 0 or geometry.max_chunk < LONG_CHUNK:
        return costs
    attention_s = _prompt_seconds(executor, geometry, far, LONG_CHUNK) - costs.step_s - LONG_CHUNK * costs.token_s
    pair_s = max(attention_s, 0.0) / (LONG_CHUNK * (far + LONG_CHUNK / 2))
    return replace(costs, long_chunk=LONG_CHUNK, long_pair_s=min(pair_s, costs.pair_s))


def _prompt_seconds(executor: Executor, geometry: Geometry, start: int, num_tokens: int) -> float:
    """Device time from one such step to the next. The first is not counted: it may take memory."""
    plan = _prefill(geometry, GREEDY, start, num_tokens)
    results = [handle.wait() for handle in [executor.launch(plan) for _ in range(1 + QUEUED_PROMPTS)]]
    return min(result.gpu_time + result.gpu_gap for result in results[1:])


def _agreed(seconds: Callable[[], float]) -> float:
    """The least of several times; measuring ends once two agree."""
    taken = [seconds()]
    while len(taken) < PROBES:
        taken.append(seconds())
        best, second = sorted(taken)[:2]
        if second <= AGREEING * best:
            break
    return min(taken)


def measure_steps(executor: Executor, geometry: Geometry, batch_sizes: tuple[int, ...]) -> StepCosts:
    """Time decode steps of greedy requests at every width; nothing is timed where there is only one.

    `batch_sizes`: those that are captured, if any are. The scheduler interpolates between the sizes that are timed.
    Call it last.
    """
    if not geometry.narrower:
        return StepCosts()
    on_cpu = not executor.slots.length.is_cuda
    wanted = CPU_COST_SIZES if on_cpu else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    largest = batch_sizes[-1] if batch_sizes else geometry.num_slots
    sizes = sorted({min(size, largest, geometry.num_slots) for size in wanted} | (set() if on_cpu else {largest}))
    of_size = _single_steps if on_cpu else _queued_steps
    # all steps in each round: a short disturbance then spoils a step in one round, not in all
    rounds = [[of_size(executor, geometry, size) for size in sizes] for _ in range(COST_ROUNDS)]
    fastest = [tuple(map(min, *rows)) for rows in zip(*rounds, strict=True)]
    resting = tuple(row[0] for row in fastest) if executor.is_self_drafting else ()
    seconds = tuple(row[-len(geometry.step_widths) :] for row in fastest)
    return StepCosts(tuple(sizes), geometry.step_widths, seconds, resting)


def _kinds(executor: Executor, geometry: Geometry) -> list[tuple[int, bool]]:
    """What is timed: (width, whether the step rests), narrowest first."""
    return [*([(1, True)] if executor.is_self_drafting else []), *((width, False) for width in geometry.step_widths)]


def measured_again(executor: Executor, geometry: Geometry, costs: StepCosts) -> float:
    """Time two of the steps again. Returns how many times as long as in `costs` they take, or the reverse."""
    worst, width = 1.0, geometry.width
    for size, row in {costs.batch_sizes[0]: costs.seconds[0], costs.batch_sizes[-1]: costs.seconds[-1]}.items():
        ratio = _step_seconds(executor, geometry, size, width, QUEUED_STEPS) / row[-1]
        worst = max(worst, ratio, 1 / ratio)
    return worst


def _queued_steps(executor: Executor, geometry: Geometry, size: int) -> list[float]:
    kinds = _kinds(executor, geometry)
    return [_step_seconds(executor, geometry, size, width, QUEUED_STEPS, rests) for width, rests in kinds]


def _single_steps(executor: Executor, geometry: Geometry, size: int) -> list[float]:
    """Seconds of one step of each kind where nothing is queued, one after another on the same requests.

    From the widest to the narrowest: so each finds the guesses that it needs, and no draft has rows to catch up with.
    """
    seconds: list[float] = []
    last = geometry.max_len - 1
    kinds = _kinds(executor, geometry)
    start = min(COST_CONTEXT, max(last - 1 - sum(width for width, _ in kinds), 0))
    length = last  # so the first width begins new requests
    for width, rests in reversed(kinds):
        if length + width > last:
            work = [_prompt(geometry, GREEDY, start, 1, slot) for slot in range(size)]
            _run(executor, StepPlan(0, Phase.PREFILL, work, geometry.width))
            length = start + 1
        decode = StepPlan(0, Phase.DECODE, [SlotWork(slot=slot) for slot in range(size)], width, rests=rests)
        result = executor.launch(decode).wait()
        seconds.append(result.gpu_time + result.gpu_gap)
        length += width
    return seconds[::-1]


def _step_seconds(
    executor: Executor, geometry: Geometry, size: int, width: int, num_steps: int, rests: bool = False
) -> float:
    """Mean device time from the tokens of one step to those of the next, with steps queued ahead."""
    room = max(geometry.max_len - 1 - num_steps * width, 0)
    num_steps = max(min(num_steps, (geometry.max_len - 1) // width), 1)
    start = min(COST_CONTEXT, room)
    work = [_prompt(geometry, GREEDY, start, 1, slot) for slot in range(size)]
    _run(executor, StepPlan(0, Phase.PREFILL, work, width))
    plan = StepPlan(0, Phase.DECODE, [SlotWork(slot=slot) for slot in range(size)], width, rests=rests)
    handles = [executor.launch(plan) for _ in range(num_steps + 1)]
    results = [handle.wait() for handle in handles]
    return sum(result.gpu_time + result.gpu_gap for result in results[1:]) / num_steps


def _timed(executor: Executor, plan: StepPlan) -> float:
    started = time.perf_counter()
    _run(executor, plan)
    return time.perf_counter() - started


def _prefill(geometry: Geometry, sampling: SamplingParams, start: int, num_tokens: int) -> StepPlan:
    return StepPlan(0, Phase.PREFILL, [_prompt(geometry, sampling, start, num_tokens)], geometry.width)


def _prefill_all(geometry: Geometry, sampling: SamplingParams, slots: range, num_tokens: int) -> StepPlan:
    work = [_prompt(geometry, sampling, start=0, num_tokens=num_tokens, slot=slot) for slot in slots]
    return StepPlan(0, Phase.PREFILL, work, geometry.width)


def _prompt(geometry: Geometry, sampling: SamplingParams, start: int, num_tokens: int, slot: int = 0) -> SlotWork:
    reset = ResetSlot(sampling, start + num_tokens, stop_ids=(0,), stop_from=start + num_tokens + 1)
    pages = [0] * geometry.num_page_columns
    chunk = array("i", [1] * num_tokens).tobytes()
    scored = (start, start + num_tokens - 1) if sampling.log_probs is not None and num_tokens > 1 else (0, 0)
    return SlotWork(slot=slot, new_pages=pages, start=start, prompt_chunk=chunk, reset=reset, scored=scored)


def _run(executor: Executor, plan: StepPlan) -> None:
    executor.launch(plan).wait()


def _run_all(executor: Executor, plans: Iterable[StepPlan]) -> None:
    """One after another; each is launched while the one before is under way, as steps that are served are."""
    before: StepHandle | None = None
    for plan in plans:
        handle = executor.launch(plan)
        if before is not None:
            before.wait()
        before = handle
    if before is not None:
        before.wait()

"""Measures how long prompts and steps take, once the engine is warm and before it is ready.

The steps that are run for it are ordinary plans on the dummy page, which leave nothing behind: the next owner of a slot
resets it, and no request reads the dummy page. `startup/warmup.py` captures with the same plans.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from overlap_spec.messages import NEVER_S, ChunkWork, PrefillCosts, ResetSlot, SamplingParams, StepCosts, StepPlan
from overlap_spec.sampling.stages import RowOutput
from overlap_spec.speculative.rows import LONG_CHUNK
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.geometry import Geometry
from overlap_spec.worker.step import StepHandle

PROBE_TOKENS = 64  # of a prompt
GREEDY = SamplingParams(temperature=0.0, seed=0)


def asking(outputs: Sequence[RowOutput], sampling: SamplingParams) -> SamplingParams:
    """The same request, asking for all of these as far as a request can, of its prompt too."""
    for output in outputs:
        sampling = output.asking(sampling)
    return sampling


def prefill_plan(
    geometry: Geometry,
    sampling: SamplingParams,
    start: int,
    num_tokens: int,
    outputs: Sequence[RowOutput] = (),
) -> StepPlan:
    """A prefill step of a prompt in slot 0, at the positions from `start` on."""
    return prefill_all_plan(geometry, sampling, range(1), num_tokens, start=start, outputs=outputs)


def prefill_all_plan(
    geometry: Geometry,
    sampling: SamplingParams,
    slots: range,
    num_tokens: int,
    all_pages: bool = False,
    start: int = 0,
    width: int = 0,
    outputs: Sequence[RowOutput] = (),
) -> StepPlan:
    """A prefill step of a whole prompt in each of these slots; the tokens before `start` count as computed.

    The first slot's page table is written to its end, as of the longest request. `all_pages`: so are the others', which
    takes half a millisecond a slot to pack; else they get the pages that the prompt and its next window need, and keep
    the dummy page behind them. `width`: 0: whole windows. `outputs`: a prompt's rows leave the device where one of
    these is asked for.
    """
    reset = ResetSlot(sampling, start + num_tokens, stop_ids=(0,), stop_from=start + num_tokens + 1)
    needed = (start + num_tokens + 2 * geometry.width) // geometry.page_size + 1
    pages = [0] * geometry.num_page_columns
    tokens = array("i", [1] * num_tokens).tobytes()
    leave = num_tokens > 1 and any(output.asked(sampling) for output in outputs)
    rows_out = (start, start + num_tokens - 1) if leave else (0, 0)
    chunks = [ChunkWork(slot, start, tokens, rows_out=rows_out) for slot in slots]
    new_pages = dict.fromkeys(slots, pages if all_pages else pages[:needed]) | {slots[0]: pages}
    return StepPlan(0, width or geometry.width, [], new_pages, chunks, dict.fromkeys(slots, reset))


def run(executor: Executor, plan: StepPlan) -> None:
    """Run one step. Sync: waits for it."""
    executor.launch(plan).wait()


def run_all(executor: Executor, plans: Iterable[StepPlan]) -> None:
    """Run steps one after another; each is launched while the one before is under way, as steps that are served are."""
    before: StepHandle | None = None
    for plan in plans:
        handle = executor.launch(plan)
        if before is not None:
            before.wait()
        before = handle
    if before is not None:
        before.wait()


CHUNK_SECONDS = 0.5  # the longest that a prefill step on a CPU may delay the other requests
PROBE_CONTEXT = 4096  # two chunks are timed, one with so many tokens before it: most of its time is attention
PROBES = 3  # how often the other one is timed, at most
PREFILL_PROBES = (1024, 4096, 16384)  # on CUDA: tokens of a short chunk, of a long one, and before another short one
AGREEING = 1.1  # no more once two times differ by at most this factor
MIN_CHUNK = 16
COST_CONTEXT = 256  # tokens before the root of the decode steps that are timed
COST_ROUNDS = 2
QUEUED_PROMPTS = 2  # on CUDA so many prefill steps are queued, and the faster counts
QUEUED_STEPS, LEAST_QUEUED = 3, 2  # on CUDA so many steps are queued, and their mean is taken
QUEUED_ROWS = 1024  # that the queued steps have together, at most, unless the fewest have more
CPU_COST_SIZES = (1, 4)  # batch sizes that are timed on a CPU, where time grows in proportion beyond them
NOT_MEASURED = PrefillCosts()


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
    near_s = _agreed(lambda: _timed(executor, prefill_plan(geometry, GREEDY, 0, num_tokens)))
    far_s = _timed(executor, prefill_plan(geometry, GREEDY, far, num_tokens))  # once: a long one is less disturbed
    fitting = int(CHUNK_SECONDS / near_s * num_tokens)
    tokens = max(MIN_CHUNK, geometry.page_size, min(fitting - fitting % geometry.page_size, geometry.max_chunk))
    attention_s = max(far_s - near_s, 0.0)
    outputs = executor.slots.outputs
    all_out = prefill_plan(geometry, asking(outputs, GREEDY), 0, num_tokens, outputs)
    out_s = _agreed(lambda: _timed(executor, all_out)) - near_s
    costs = PrefillCosts(
        0.0,
        near_s / num_tokens,
        attention_s / (num_tokens * far) if far else 0.0,
        out_s=max(out_s, 0.0) / num_tokens,
    )
    return ChunkSize(tokens, int(CHUNK_SECONDS / attention_s * num_tokens * far) if attention_s else 0, costs)


def measure_prefill(executor: Executor, geometry: Geometry, padded_rows: tuple[int, ...]) -> PrefillCosts:
    """Time prefill steps with others queued ahead: a short chunk, a long one, and a short one far from its start."""
    longest = min(geometry.max_chunk, geometry.max_len - 1)
    few, many = (min(size, longest) for size in PREFILL_PROBES[:2])
    far = min(PREFILL_PROBES[2], geometry.max_len - 1 - few)
    near_s = _prompt_seconds(executor, geometry, 0, few)
    pair_s = max(_prompt_seconds(executor, geometry, far, few) - near_s, 0.0) / (few * far) if far else 0.0
    out_s = max(_prompt_seconds(executor, geometry, 0, few, asking(executor.slots.outputs, GREEDY)) - near_s, 0.0) / few
    if many == few:
        return PrefillCosts(0.0, near_s / few, pair_s, padded_rows, out_s=out_s)
    more_s = _prompt_seconds(executor, geometry, 0, many) - near_s - pair_s * (many**2 - few**2) / 2
    token_s = max(more_s / (many - few), near_s / few / 2)
    step_s = max(near_s - few * token_s - pair_s * few**2 / 2, 0.0)
    costs = PrefillCosts(step_s, token_s, pair_s, padded_rows, out_s=out_s)
    return _with_long_chunks(executor, geometry, costs)


def _with_long_chunks(executor: Executor, geometry: Geometry, costs: PrefillCosts) -> PrefillCosts:
    """Time the shortest chunk that attends by itself, far from its start, if there is room for one."""
    far = min(PREFILL_PROBES[2], geometry.max_len - 1 - LONG_CHUNK)
    if far <= 0 or geometry.max_chunk < LONG_CHUNK:
        return costs
    attention_s = _prompt_seconds(executor, geometry, far, LONG_CHUNK) - costs.step_s - LONG_CHUNK * costs.token_s
    pair_s = max(attention_s, 0.0) / (LONG_CHUNK * (far + LONG_CHUNK / 2))
    return replace(costs, long_chunk=LONG_CHUNK, long_pair_s=min(pair_s, costs.pair_s))


def _prompt_seconds(
    executor: Executor, geometry: Geometry, start: int, num_tokens: int, sampling: SamplingParams = GREEDY
) -> float:
    """Device time from one such step to the next. The first is not counted: it may take memory."""
    plan = prefill_plan(geometry, sampling, start, num_tokens, executor.slots.outputs)
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
    # all steps in each round: a short disturbance then spoils a step in one round, not in all
    rounds = [[_steps(executor, geometry, size, queued=not on_cpu) for size in sizes] for _ in range(COST_ROUNDS)]
    fastest = [tuple(map(min, *rows)) for rows in zip(*rounds, strict=True)]
    undrafted = tuple(row[0] for row in fastest) if executor.is_self_drafting else ()
    drafted, count = [row[len(undrafted[:1]) :] for row in fastest], len(geometry.step_widths)
    seconds = tuple((*row, *[NEVER_S] * (count - len(row))) for row in drafted)
    return StepCosts(tuple(sizes), geometry.step_widths, seconds, undrafted)


def again(executor: Executor, geometry: Geometry, costs: StepCosts) -> Iterator[tuple[int, int, float]]:
    """Time three of the steps again: the fewest rows, the most, and one between them.

    Yields its requests, its width, and how many times as long as in `costs` it takes.
    """
    few, many = (0, 0), (len(costs.batch_sizes) - 1, len(costs.widths) - 1)
    for row, column in dict.fromkeys((few, (many[0] // 2, many[1] // 2), many)):
        column = min(column, sum(taken < NEVER_S for taken in costs.seconds[row]) - 1)
        size, width = costs.batch_sizes[row], costs.widths[column]
        seconds = _step_seconds(executor, geometry, size, width, queued_steps(size, width))
        yield size, width, seconds / costs.seconds[row][column]


def queued_steps(size: int, width: int) -> int:
    """Steps that are queued on CUDA: few of many rows, each of which takes milliseconds."""
    return max(LEAST_QUEUED, min(QUEUED_STEPS, QUEUED_ROWS // (size * width)))


def _kinds(executor: Executor, geometry: Geometry, size: int) -> list[tuple[int, bool]]:
    """What is timed: (width, whether nothing is drafted after it), narrowest first."""
    widths = [width for width in geometry.step_widths if size <= geometry.largest_batch(width)]
    return [*([(1, True)] if executor.is_self_drafting else []), *((width, False) for width in widths)]


def _steps(executor: Executor, geometry: Geometry, size: int, queued: bool) -> list[float]:
    """Seconds of one step of each kind, narrowest first, all on the same requests while these have room.

    From the widest to the narrowest: so each finds the guesses that it needs, and no draft has rows to catch up with.
    `queued`: several are, of which the first is not counted, because it may wait for its launch.
    """
    last = geometry.max_len - 1
    kinds = _kinds(executor, geometry, size)
    counts = [_steps_in(last, width, queued_steps(size, width) + 1 if queued else 1) for width, _ in kinds]
    needed = sum(count * width for count, (width, _) in zip(counts, kinds, strict=True))
    start = min(COST_CONTEXT, max(last - 1 - needed, 0))
    length = last  # so the first width begins new requests
    seconds: list[float] = []
    for count, (width, undrafted) in zip(reversed(counts), reversed(kinds), strict=True):
        if length + count * width > last:
            run(executor, prefill_all_plan(geometry, GREEDY, range(size), 1, start=start))
            length = start + 1
        decode = StepPlan(0, width, list(range(size)), drafts=not undrafted)
        seconds.append(_mean_seconds(executor, decode, count))
        length += count * width
    return seconds[::-1]


def _steps_in(last: int, width: int, count: int) -> int:
    """So many steps, or as many as a request of `last` tokens after its first has room for; one at least."""
    return max(min(count, (last - 1) // width), 1)


def _mean_seconds(executor: Executor, plan: StepPlan, count: int) -> float:
    """Device time from the tokens of one step to those of the next, of steps that are queued together but the first."""
    results = [handle.wait() for handle in [executor.launch(plan) for _ in range(count)]]
    counted = [result for result in results[1:] if result.is_typical] or results
    return sum(result.gpu_time + result.gpu_gap for result in counted) / len(counted)


def _step_seconds(executor: Executor, geometry: Geometry, size: int, width: int, num_steps: int) -> float:
    """Mean device time of a step of new requests, with others queued ahead."""
    last = geometry.max_len - 1
    count = _steps_in(last, width, num_steps + 1)
    start = min(COST_CONTEXT, max(last - 1 - count * width, 0))
    run(executor, prefill_all_plan(geometry, GREEDY, range(size), 1, start=start, width=width))
    return _mean_seconds(executor, StepPlan(0, width, list(range(size))), count)


def _timed(executor: Executor, plan: StepPlan) -> float:
    started = time.perf_counter()
    run(executor, plan)
    return time.perf_counter() - started

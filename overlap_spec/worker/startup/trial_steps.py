"""Steps that are run before the engine is ready: ordinary plans on the dummy page, which leave nothing behind.

The next owner of a slot resets it, and no request reads the dummy page.
"""

from array import array
from collections.abc import Iterable, Sequence

from overlap_spec.messages import ChunkWork, ResetSlot, SamplingParams, StepPlan
from overlap_spec.sampling.stages import RowOutput
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
    all_pages: bool = True,
    start: int = 0,
    width: int = 0,
    outputs: Sequence[RowOutput] = (),
) -> StepPlan:
    """A prefill step of a whole prompt in each of these slots; the tokens before `start` count as computed.

    `all_pages`: the page tables are written to their ends, as of the longest request; to pack so many pages takes half
    a millisecond a slot. Otherwise they get those that the prompt and its next window need. `width`: 0: whole windows.
    `outputs`: a prompt's rows leave the device where one of these is asked for.
    """
    reset = ResetSlot(sampling, start + num_tokens, stop_ids=(0,), stop_from=start + num_tokens + 1)
    needed = (start + num_tokens + 2 * geometry.width) // geometry.page_size + 1
    pages = [0] * (geometry.num_page_columns if all_pages else min(needed, geometry.num_page_columns))
    tokens = array("i", [1] * num_tokens).tobytes()
    leave = num_tokens > 1 and any(output.asked(sampling) for output in outputs)
    rows_out = (start, start + num_tokens - 1) if leave else (0, 0)
    chunks = [ChunkWork(slot, start, tokens, rows_out=rows_out) for slot in slots]
    new_pages, resets = dict.fromkeys(slots, pages), dict.fromkeys(slots, reset)
    return StepPlan(0, width or geometry.width, [], new_pages, chunks, resets)


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

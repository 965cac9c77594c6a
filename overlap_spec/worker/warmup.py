"""Runs every kind of step once before the engine says ready, and measures how long prompts take.

Not here: the steps. Warm-up plans are ordinary plans on slot 0 and the dummy page, so they leave nothing behind:
the next owner resets the slot, and nobody reads the dummy page.
"""

import time
from array import array

from overlap_spec.messages import Phase, ResetSlot, SamplingParams, SlotWork, StepPlan
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.geometry import Geometry

CHUNK_SECONDS = 0.5  # what a prefill step on a CPU may delay everybody else
PROBE_TOKENS = 64
MIN_CHUNK = 16

GREEDY = SamplingParams(temperature=0.0, seed=0)
SAMPLED = SamplingParams(temperature=1.0, seed=0)
FILTERED = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, min_new_tokens=1, seed=0)


def warm_up(executor: Executor, geometry: Geometry) -> None:
    """Prefill and decode once in each variant: greedy, sampled, filtered and masked."""
    for sampling in (GREEDY, SAMPLED, FILTERED):
        _run(executor, _prefill(geometry, sampling, start=0, num_tokens=min(PROBE_TOKENS, geometry.max_len - 1)))
        for _ in range(2):
            _run(executor, StepPlan(0, Phase.DECODE, [SlotWork(slot=0)], geometry.width))


def measure_chunk(executor: Executor, geometry: Geometry) -> int:
    """Prompt tokens that a prefill step may hold so that it takes at most half a second, at the far end of the context.

    A chunk is slowest where it attends to the most keys. Call it after `warm_up`.
    """
    num_tokens = min(PROBE_TOKENS, geometry.max_len - 1)
    plan = _prefill(geometry, GREEDY, start=geometry.max_len - 1 - num_tokens, num_tokens=num_tokens)
    started = time.perf_counter()
    _run(executor, plan)
    seconds = time.perf_counter() - started
    fitting = int(CHUNK_SECONDS / seconds * num_tokens)
    return max(MIN_CHUNK, geometry.page_size, min(fitting - fitting % geometry.page_size, geometry.max_chunk))


def _prefill(geometry: Geometry, sampling: SamplingParams, start: int, num_tokens: int) -> StepPlan:
    reset = ResetSlot(sampling, start + num_tokens, stop_ids=(0,), stop_from=start + num_tokens + 1)
    pages = [0] * geometry.num_page_columns
    chunk = array("i", [1] * num_tokens).tobytes()
    work = SlotWork(slot=0, new_pages=pages, start=start, prompt_chunk=chunk, reset=reset)
    return StepPlan(0, Phase.PREFILL, [work], geometry.width)


def _run(executor: Executor, plan: StepPlan) -> None:
    handle = executor.launch(plan)
    handle.wait()
    handle.finished.result()

"""Runs every kind of step once before the engine says ready, and measures how long prompts take.

Not here: the steps. Warm-up plans are ordinary plans on slot 0 and the dummy page, so they leave nothing behind:
the next owner resets the slot, and nobody reads the dummy page.
"""

import time
from array import array
from dataclasses import dataclass

from overlap_spec.messages import Phase, ResetSlot, SamplingParams, SlotWork, StepPlan
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.geometry import Geometry
from overlap_spec.worker.graphs import GraphDecoder

CHUNK_SECONDS = 0.5  # what a prefill step on a CPU may delay everybody else
PROBE_TOKENS = 64
MIN_CHUNK = 16

GREEDY = SamplingParams(temperature=0.0, seed=0)
SAMPLED = SamplingParams(temperature=1.0, seed=0)
FILTERED = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, min_new_tokens=1, seed=0)


def warm_up(executor: Executor, geometry: Geometry, prompt_lengths: tuple[int, ...] = (PROBE_TOKENS,)) -> None:
    """Prefill and decode once in each variant: greedy, sampled, filtered and masked."""
    for num_tokens in prompt_lengths:
        _run(executor, _prefill(geometry, GREEDY, start=0, num_tokens=min(num_tokens, geometry.max_len - 1)))
    for sampling in (GREEDY, SAMPLED, FILTERED):
        _run(executor, _prefill(geometry, sampling, start=0, num_tokens=min(PROBE_TOKENS, geometry.max_len - 1)))
        for _ in range(2):
            _run(executor, StepPlan(0, Phase.DECODE, [SlotWork(slot=0)], geometry.width))


def cuda_prompt_lengths(geometry: Geometry) -> tuple[int, ...]:
    """Prompt chunks that between them meet every attention tile and number of splits, and need the most memory."""
    return (1, 6, 16, PROBE_TOKENS, 256, 512, 1024, geometry.max_chunk)


def capture_graphs(executor: Executor, geometry: Geometry, batch_sizes: tuple[int, ...]) -> float:
    """Let decode steps run as CUDA graphs from now on. Returns the seconds it took; nothing may be in flight."""
    started = time.perf_counter()
    if batch_sizes:
        decoder = GraphDecoder(executor.decode_step, executor.slots, geometry.width, batch_sizes)
        decoder.capture()
        executor.decoder = decoder
    return time.perf_counter() - started


@dataclass(frozen=True)
class ChunkSize:
    """How much prompt a prefill step may hold (`WorkerReady`)."""

    tokens: int
    pairs: int


def measure_chunk(executor: Executor, geometry: Geometry) -> ChunkSize:
    """Size prefill steps so that one takes at most half a second, by timing one at either end of the context.

    The difference between the two is attention to the keys before the chunk. Call it after `warm_up`.
    """
    num_tokens = min(PROBE_TOKENS, geometry.max_len - 1)
    far = geometry.max_len - 1 - num_tokens
    near_s, far_s = (
        min(_timed(executor, _prefill(geometry, GREEDY, start, num_tokens)) for _ in range(2)) for start in (0, far)
    )
    fitting = int(CHUNK_SECONDS / near_s * num_tokens)
    tokens = max(MIN_CHUNK, geometry.page_size, min(fitting - fitting % geometry.page_size, geometry.max_chunk))
    attention_s = max(far_s - near_s, 0.0)
    return ChunkSize(tokens, int(CHUNK_SECONDS / attention_s * num_tokens * far) if attention_s else 0)


def _timed(executor: Executor, plan: StepPlan) -> float:
    started = time.perf_counter()
    _run(executor, plan)
    return time.perf_counter() - started


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

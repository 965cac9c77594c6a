"""What "the next step is queued while this one runs" looks like: the same chat with one and with two steps in flight.

    python examples/04_timeline.py [MODEL]

One run each, traced; then a few decode steps in the middle of it. `overlap-spec bench step --trace FILE` writes all of
a run for ui.perfetto.dev.
"""

import asyncio
import sys

from overlap_spec import EngineConfig
from overlap_spec.bench.step import TracedRun, decode_steps, timeline, traced_run
from overlap_spec.bench.workload import Workload

NUM_STEPS = 5
LEGEND = """
queued   a step's plan has been sent, and its work has not begun
device   the step works; d: its tokens are out, and the draft proposes the next window
settled  the scheduler has read its tokens
"""


async def run(model: str, depth: int) -> TracedRun:
    """One chat, 48 tokens."""
    config = EngineConfig(
        model_path=model, max_total_tokens=4096, log_level="warning", disable_overlap_schedule=depth == 1
    )
    return await traced_run(config, Workload(num_tokens=48, batch_sizes=(1,)))


async def main(model: str) -> None:
    """Depth 1, then depth 2."""
    print(LEGEND)
    for depth in (1, 2):
        result = await run(model, depth)
        steps, step = decode_steps(result.records), result.report["step"]
        print(f"{depth} in flight: {step['step_ms']:.2f} ms a step, of which the device waits {step['gap_ms']:.2f} ms")
        print(timeline(result.records, steps[len(steps) // 2 - NUM_STEPS // 2], NUM_STEPS), end="\n\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))

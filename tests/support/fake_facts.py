"""Facts of an engine that never ran, for tests of what shows them."""

from typing import Any

from msgspec.structs import replace

from overlap_spec.messages import CpuFacts, EngineFacts, FrontendFacts, SchedulerFacts, WorkerFacts

MIB = 1 << 20

WORKER = WorkerFacts(
    device="cpu",
    num_pages=7,
    page_size=4,
    num_slots=4,
    chunk_tokens=64,
    platform=CpuFacts("a processor", 2, 1, "threads sleep", "as loaded"),
    graph_batch_sizes=(),
    graph_counts={},
    graph_s={},
    step_widths=(1, 4),
    start_s={"imports": 1.0, "weights": 0.25},
    bytes_per_s=30e9,
    flop_per_s=0.0,
    verification="none",
    acceptance="real",
    weight_bytes=513 * MIB,
    draft_weight_bytes=37 * MIB,
    kv_bytes_per_token=512,
    draft_kv_bytes_per_token=64,
)
SCHEDULER = SchedulerFacts(28, 4, 64, 64, 2, 2)
FRONTEND = FrontendFacts("none: token ids only", "ipc:///x")


def fake_facts(**worker: Any) -> EngineFacts:
    """A CPU engine's; `worker` changes fields of the worker's."""
    return EngineFacts(FRONTEND, SCHEDULER, replace(WORKER, **worker))

"""`bench step` on a GPU, and what those see who watch.

Its track is on the host's clock, steps are launched ahead at depth 2, and parts add up.

SmolLM2's GGUF is taken from the cache directory of the default model. Run by hand on a GPU: `pytest -m cuda`.
"""

import asyncio

import pytest

from overlap_spec.bench.step import TracedRun, traced_run
from overlap_spec.bench.step_summary import device_steps
from overlap_spec.bench.workload import Workload
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.messages import Record, SamplingParams
from overlap_spec.runtime.tracing import CLIENT, GPU, SCHEDULER, TOKENIZER, WORKER

CLOCK_S = 50e-6  # by which the two clocks may differ
CHAIN = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
WORKLOAD = Workload(num_tokens=200, batch_sizes=(1,))


def run(depth: int, **changes: object) -> TracedRun:
    flags = CHAIN | {"disable_overlap_schedule": depth == 1} | changes
    config = EngineConfig(device="cuda", max_total_tokens=20_000, log_level="warning", **flags)
    return asyncio.run(traced_run(config, WORKLOAD))


def spans(records: list[Record], track: str, name: str) -> dict[int, Record]:
    return {record.step: record for record in records if (record.track, record.name) == (track, name)}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_device_works_after_the_launch_and_before_the_result(depth: int) -> None:
    records = run(depth).records
    steps, launches = device_steps(records), spans(records, WORKER, "launch")
    sent, settles = spans(records, WORKER, "result sent"), spans(records, SCHEDULER, "settle")
    decodes = [step for step, times in steps.items() if times.phase == "decode" and step in settles]
    assert len(decodes) > 40
    verified = spans(records, GPU, "verify+accept")
    for step in decodes:
        assert launches[step].begin - CLOCK_S <= steps[step].begin
        assert verified[step].end - CLOCK_S <= sent[step].begin <= settles[step].begin
    pairs = [(step, step + 1) for step in decodes if step + 1 in launches]
    ahead = sum(launches[after].begin < settles[step].begin for step, after in pairs) / len(pairs)
    assert ahead > 0.9 if depth == 2 else ahead == 0
    gpu = sorted((record for record in records if record.track == GPU), key=lambda record: record.begin)
    assert all(first.end <= second.begin + 1e-6 for first, second in zip(gpu, gpu[1:], strict=False))


def test_parts_of_a_replayed_step() -> None:
    """Graphs tell the parts of their last replay only; they are the whole of that step."""
    step = run(2).report["step"]
    assert list(step["parts_ms"]) == ["verify+accept", "extend+draft"]
    split = step["last_step_split_ms"]
    assert list(split) == ["verify", "accept", "extend", "draft"] and min(split.values()) > 0
    assert sum(split.values()) == pytest.approx(sum(step["parts_ms"].values()), rel=0.2)
    assert 0 < step["efficiency"] < 1


def test_parts_of_an_eager_step() -> None:
    step = run(2, disable_cuda_graph=True).report["step"]
    assert list(step["parts_ms"]) == ["verify", "accept", "extend", "draft"]
    assert "last_step_split_ms" not in step


async def watched() -> list[Record]:
    """What those see who ask every fifth of a second while a request runs."""
    config = EngineConfig(device="cuda", max_total_tokens=20_000, log_level="warning", **CHAIN)
    async with Engine(config, watched=True) as engine:
        seen: list[Record] = []

        async def watch() -> None:
            while True:
                seen[:] = engine.watch() or seen
                await asyncio.sleep(0.2)

        watching = asyncio.create_task(watch())
        sampling = SamplingParams(max_new_tokens=1500, temperature=0.0, ignore_eos=True)
        async for _ in engine.generate("Once upon a time", sampling):
            pass
        watching.cancel()
    return seen


def test_who_watches_sees_steps_queued_while_others_run() -> None:
    records = asyncio.run(watched())
    assert {record.track for record in records} == {CLIENT, TOKENIZER, SCHEDULER, WORKER, GPU}
    ends: dict[int, float] = {}
    for record in records:
        if record.track == GPU:
            ends[record.step] = max(record.end, ends.get(record.step, 0.0))
    plans, sent = spans(records, SCHEDULER, "plan"), spans(records, WORKER, "result sent")
    tokens = spans(records, GPU, "verify+accept")
    decodes = [step for step in tokens if step in sent]
    assert len(decodes) > 40
    late = sorted(sent[step].begin - tokens[step].end for step in decodes)
    print(f"tokens out to result sent, us: {1e6 * late[0]:.1f} .. {1e6 * late[len(late) // 2]:.1f}")
    assert late[0] > -CLOCK_S and late[len(late) // 2] < 0.001
    queued = [plans[step + 1].end < ends[step] for step in decodes if step + 1 in plans]
    assert sum(queued) / len(queued) > 0.9
    device = sorted((record for record in records if record.track == GPU), key=lambda record: record.begin)
    apart = [(first.end, second.begin) for first, second in zip(device, device[1:], strict=False)]
    assert all(end <= begin + CLOCK_S for end, begin in apart)  # two answers place the device's clock by themselves

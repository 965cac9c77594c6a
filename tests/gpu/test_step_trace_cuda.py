"""`bench step` on a GPU, and what those see who watch.

Its track is on the host's clock, steps are launched ahead at depth 2, and parts add up. Other tests may keep cores and
GPU busy meanwhile: times are compared within a run, as far as its clocks are known to agree.

SmolLM2's GGUF is taken from the cache directory of the default model. Run by hand on a GPU: `pytest -m cuda`.
"""

import asyncio
import functools
from pathlib import Path

import pytest

from overlap_spec.bench.step import TracedRun, device_steps, traced_run
from overlap_spec.bench.workload import Workload
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.messages import Record, SamplingParams
from overlap_spec.runtime.tracing import CLIENT, FRONTEND, GPU, LAST_STEP_SPLIT, SCHEDULER, WORKER, read_records

DRIFT_S = 50e-6  # by which one clock may run unevenly against the other during a run
ROUNDING_S = 1e-6
CHAIN = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
WORKLOAD = Workload(num_tokens=200, batch_sizes=(1,))
NUM_TRACKS = 5  # the client, three processes and the GPU
ENDLESS = SamplingParams(max_new_tokens=1500, temperature=0.0, ignore_eos=True)


def config_of(**changes: object) -> EngineConfig:
    return EngineConfig(device="cuda", max_total_tokens=20_000, log_level="warning", **CHAIN | changes)


@functools.cache
def run(depth: int, eager: bool = False) -> TracedRun:
    config = config_of(disable_overlap_schedule=depth == 1, disable_cuda_graph=eager)
    return asyncio.run(traced_run(config, WORKLOAD))


def spans(records: list[Record], track: str, name: str) -> dict[int, Record]:
    return {record.step: record for record in records if (record.track, record.name) == (track, name)}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_device_works_after_the_launch_and_before_the_result(depth: int) -> None:
    report, records = run(depth).report, run(depth).records
    off = DRIFT_S + report["step"]["clock_error_ms"] / 1000
    steps, launches = device_steps(records), spans(records, WORKER, "launch")
    sent, settles = spans(records, WORKER, "result sent"), spans(records, SCHEDULER, "settle")
    decodes = [step for step, times in steps.items() if times.phase == "decode" and step in settles]
    assert len(decodes) > 40
    verified = spans(records, GPU, "verify+accept")
    for step in decodes:
        assert launches[step].begin - off <= steps[step].begin
        assert verified[step].end - off <= sent[step].begin <= settles[step].begin
    pairs = [(step, step + 1) for step in decodes if step + 1 in launches]
    ahead = sum(launches[after].begin < settles[step].begin for step, after in pairs) / len(pairs)
    assert ahead > 0.5 if depth == 2 else ahead == 0
    gpu = sorted((record for record in records if record.track == GPU), key=lambda record: record.begin)
    assert all(first.end <= second.begin + ROUNDING_S for first, second in zip(gpu, gpu[1:], strict=False))


def test_parts_of_a_replayed_step() -> None:
    step = run(2).report["step"]
    assert list(step["parts_ms"]) == ["verify+accept", "extend+draft"]
    assert list(step["last_step_split_ms"]) == ["verify", "accept", "extend", "draft"]
    assert 0 < step["efficiency"] < 1


def test_graphs_tell_the_parts_of_their_last_replay(tmp_path: Path) -> None:
    """They are the whole of that step."""

    async def serve() -> None:
        async with Engine(config_of(), trace_dir=tmp_path) as engine:
            async for _ in engine.generate("Once upon a time", ENDLESS):
                pass

    asyncio.run(serve())
    records = read_records(tmp_path)
    split = next(record for record in records if record.name == LAST_STEP_SPLIT)
    last = [record for record in records if record.track == GPU and record.step == split.step]
    assert last and min(split.args.values()) > 0
    for record in last:
        parts = [split.args[name] for name in record.name.split("+")]
        assert sum(parts) == pytest.approx(1000 * (record.end - record.begin), abs=0.01)


def test_parts_of_an_eager_step() -> None:
    step = run(2, eager=True).report["step"]
    assert list(step["parts_ms"]) == ["verify", "accept", "extend", "draft"]
    assert "last_step_split_ms" not in step


async def watched() -> list[Record]:
    """What those see who ask every fifth of a second while requests run, until every process has answered.

    A request takes half a second. On a machine that is busy with other tests, an answer may take longer.
    """
    async with Engine(config_of(), watched=True) as engine:
        seen: list[Record] = []

        async def watch() -> None:
            while True:
                seen[:] = engine.watch() or seen
                await asyncio.sleep(0.2)

        watching = asyncio.create_task(watch())
        async with asyncio.timeout(60):
            while len({record.track for record in seen}) < NUM_TRACKS:
                async for _ in engine.generate("Once upon a time", ENDLESS):
                    pass
        watching.cancel()
    return seen


def test_who_watches_sees_steps_queued_while_others_run() -> None:
    records = asyncio.run(watched())
    assert {record.track for record in records} == {CLIENT, FRONTEND, SCHEDULER, WORKER, GPU}
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
    assert late[0] > -ROUNDING_S
    pairs = [(step, step + 1) for step in decodes if step + 1 in tokens and step + 1 in plans]
    assert sum(sent[step].begin < tokens[after].end for step, after in pairs) > 0.5 * len(pairs)
    assert sum(plans[after].end < ends[step] for step, after in pairs) > 0.5 * len(pairs)
    device = sorted((record for record in records if record.track == GPU), key=lambda record: record.begin)
    overlaps = [first.end > second.begin + ROUNDING_S for first, second in zip(device, device[1:], strict=False)]
    assert sum(overlaps) < 0.1 * len(device)  # only where answers meet: each places the device's clock by itself

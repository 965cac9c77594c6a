"""The live audit: it finds nothing where nothing is wrong, and every planted error."""

import asyncio
import random
from functools import partial
from pathlib import Path

import msgspec
import pytest
from support.audited_ring import Served, audited_config, serve_audited
from support.planted_faults import PLANTS
from support.ring import RingConfig, running, tiny_loaded
from support.storm import run_seeds
from support.tiny.methods import TINY_METHODS

from overlap_spec.config import AuditSettings
from overlap_spec.messages import SamplingParams
from overlap_spec.tokenizer.audit.auditor import AuditFault
from overlap_spec.tokenizer.codec import TextCodec

ALL = AuditSettings(1.0)
WRONG_EVERY = 400  # verify steps of a slot: about one token in a thousand is wrong
every_plant = pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)


def test_every_request_of_a_storm_is_plain_decodings(codec: TextCodec) -> None:
    """Among preemptions, aborts and prefix hits."""
    seen = run_seeds(range(5), codec, {"audit": ALL})
    assert seen["audited_tokens"] > 50 and seen["audit_steps_between_others"] > 0, dict(seen)


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in TINY_METHODS if name != "EAGLE3"])
def test_of_every_method(codec: TextCodec, method: str) -> None:
    assert run_seeds(range(3), codec, {"method": method, "audit": ALL})["audited_tokens"] > 20


def planted(codec: TextCodec, plant: object, seed: int, rate: float, most_tokens: int) -> Served:
    spoil = partial(plant, rng=random.Random(seed), every=WRONG_EVERY)  # type: ignore[operator, arg-type]
    return serve_audited(audited_config(rate), codec, seed, most_tokens, spoil)


@pytest.mark.slow_but_every(3)
@every_plant
def test_a_planted_error_is_a_fault(codec: TextCodec, plant: object) -> None:
    served = planted(codec, plant, 3, 0.5, 6000)
    assert served.report.figures.faults > 0, served


@pytest.mark.full
@pytest.mark.timeout(7200)
@every_plant
@pytest.mark.parametrize(("rate", "most_tokens"), [(0.5, 20_000), (0.05, 200_000)])
def test_a_planted_error_is_found_in_20_of_20_runs(
    codec: TextCodec, plant: object, rate: float, most_tokens: int
) -> None:
    runs = [planted(codec, plant, seed, rate, most_tokens) for seed in range(20)]
    assert all(run.report.figures.faults > 0 for run in runs), [run.tokens for run in runs]


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_nothing_is_found_in_200_000_tokens(codec: TextCodec, record_summary) -> None:
    served = serve_audited(audited_config(1.0), codec, 1, 200_000)
    figures = served.report.figures
    record_summary("audit_200000", msgspec.structs.asdict(figures))
    assert figures.tokens >= 200_000 and not served.report.recent and not figures.control_differences


async def serve_a_wrong_token(codec: TextCodec, settings: AuditSettings, num_requests: int) -> tuple[object, list[int]]:
    """Every second guess that is rejected is accepted. Returns the report, and the widths of later decode steps."""
    config = RingConfig(audit=settings)
    async with running(tiny_loaded(3, config.num_steps), config, codec) as ring:
        PLANTS["a rejected guess accepted"](ring.executor, random.Random(0), 2)
        sampling = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
        await ring.ask([7, 8, 9], sampling)
        await ring.idle()
        ring.plans.widths.clear()
        for _ in range(num_requests - 1):
            await ring.ask([7, 8, 9, 10], sampling)
        return ring.auditor.report(), sorted(ring.plans.widths)


def test_a_fault_is_written_with_all_that_reproduces_it(codec: TextCodec, tmp_path: Path) -> None:
    file = tmp_path / "audit" / "faults.jsonl"
    asyncio.run(serve_a_wrong_token(codec, AuditSettings(1.0, "log", str(file)), 1))
    record = msgspec.json.decode(file.read_bytes().splitlines()[0])
    assert record["prompt_ids"] == [7, 8, 9] and len(record["output_ids"]) == 30
    assert sum(record["step_tokens"]) == 30 and len(record["step_ids"]) == len(record["step_tokens"])
    fault = record["faults"][0]
    index = fault["position"] - 3
    assert record["output_ids"][index] == fault["served"] != fault["drawn"] and fault["margin"] > 1e-9
    before = 0
    for step_id, count in zip(record["step_ids"], record["step_tokens"], strict=True):
        before += count
        if before > index:
            assert step_id == fault["step_id"]
            break
    assert record["sampling"]["temperature"] == 0.0 and record["sampling"]["seed"] is not None


def test_disable_switches_speculation_off(codec: TextCodec, tmp_path: Path) -> None:
    settings = AuditSettings(1.0, "disable", str(tmp_path / "faults.jsonl"))
    report, widths = asyncio.run(serve_a_wrong_token(codec, settings, 3))
    assert widths == [1] and not report.figures.speculating  # type: ignore[attr-defined]


def test_stop_ends_the_engine(codec: TextCodec, tmp_path: Path) -> None:
    settings = AuditSettings(1.0, "stop", str(tmp_path / "faults.jsonl"))
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(serve_a_wrong_token(codec, settings, 1))
    assert caught.group_contains(AuditFault)

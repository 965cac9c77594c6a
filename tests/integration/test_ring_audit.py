"""The live audit: it finds nothing where nothing is wrong, and every planted error."""

import asyncio
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from support.audited_ring import Served, audited_config, serve_audited
from support.late_grammars import grammars_of
from support.planted_faults import PLANTS, Chance, forbid_a_token, keep_a_rejected_token
from support.random_schedules import run_seeds
from support.ring import Ring, RingConfig, running, tiny_loaded
from support.scheduler_features import audits_of
from support.tiny.grammars import TINY_GRAMMARS
from support.tiny.methods import TINY_METHODS

from overlap_spec.config import AuditSettings
from overlap_spec.features.audit.frontend import AuditFault
from overlap_spec.features.audit.scheduler import GRAMMAR_ENDED
from overlap_spec.features.audit.transcripts import Transcript
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import AuditReport, Finish, Grammar, GrammarKind, SamplingParams
from overlap_spec.runtime import source
from overlap_spec.worker.executor import Executor

ALL = AuditSettings(1.0)
Plant = Callable[[Executor, Chance], None]
# Windows: about one error in a thousand tokens changes a token. Of stale rows half do, of shifted windows one in four.
WRONG_EVERY = {"a rejected guess accepted": 800, "a stale KV row": 400, "a window one position off": 200}
OWN_LAYER = "NEXTN in DeepSeek's layout"
MIXTURES = [("glm 4.5", OWN_LAYER), ("qwen3 moe", "EAGLE3"), ("deepseek v3", OWN_LAYER)]
FORBIDDEN = 3  # a token that no grammar of letters allows
THIS_CODE = source.Source("c0ffee", {}, {})
every_plant = pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)


@pytest.fixture(autouse=True)
def _code_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a second, which is more than most of these tests do."""
    monkeypatch.setattr(source, "describe_source", lambda: THIS_CODE)


@pytest.mark.slow  # nothing is found in what tests below audit
def test_every_request_of_random_schedules_is_plain_decodings(codec: TextCodec) -> None:
    """Among preemptions, aborts and prefix hits."""
    seen = run_seeds(range(1, 2), codec, {"audit": ALL})
    assert seen["audited_tokens"] > 50 and seen["audit_steps_between_others"] > 0, dict(seen)


@pytest.mark.full_but_every(20)
@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in TINY_METHODS if name != "EAGLE3"])
def test_of_every_method(codec: TextCodec, method: str) -> None:
    assert run_seeds(range(3), codec, {"method": method, "audit": ALL})["audited_tokens"] > 20


@pytest.mark.full
@pytest.mark.parametrize(("family", "method"), MIXTURES)
def test_of_mixtures(codec: TextCodec, family: str, method: str) -> None:
    seen = run_seeds(range(3), codec, {"family": family, "method": method, "audit": ALL})
    assert seen["audited_tokens"] > 20 and seen["accepted"] > 0, dict(seen)


@pytest.mark.slow
@pytest.mark.parametrize("method", [OWN_LAYER, pytest.param("EAGLE3", marks=pytest.mark.full)])
@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.full), True])
def test_of_layers_that_recur(codec: TextCodec, method: str, deterministic: bool) -> None:
    """The first token is not compared: its bits are a chunk's."""
    engine = {"family": "qwen3 next", "method": method, "audit": ALL, "deterministic": deterministic}
    seen = run_seeds(range(4, 5), codec, engine)
    assert seen["audited_tokens"] > 30 and seen["accepted"] + seen["rejected"] > 0, dict(seen)


@pytest.mark.slow
def test_a_state_that_keeps_a_rejected_token_is_a_fault(codec: TextCodec) -> None:
    config = audited_config(1.0, deterministic=True, page_size=64, max_len=256, num_snapshots=4)
    spoil = partial(keep_a_rejected_token, chance=Chance(20))
    found = serve_audited(config, codec, 0, 1500, spoil, family="qwen3 next").report
    assert found.figures.faults > 0 and found.recent[0].is_fault, found


def planted(codec: TextCodec, plant: Plant, chance: Chance, rate: float, most_tokens: int) -> Served:
    spoil = partial(plant, chance=chance)
    return serve_audited(audited_config(rate), codec, chance.seed, most_tokens, spoil)


@pytest.mark.full_but_every(4)
@pytest.mark.slow  # quick tests below find rejected guesses that were accepted
@every_plant
def test_a_planted_error_is_a_fault(codec: TextCodec, plant: Plant) -> None:
    """Errors are frequent, so that few requests are enough."""
    served = serve_audited(audited_config(1.0), codec, 0, 6000, partial(plant, chance=Chance(20)))
    assert served.report.figures.faults > 0, served


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize(("rate", "most_tokens"), [(0.5, 20_000), (0.05, 200_000)])
def test_a_planted_error_is_found_in_20_of_20_runs(
    codec: TextCodec, plant: str, rate: float, most_tokens: int, record_summary: Callable[..., None]
) -> None:
    chances = [Chance(WRONG_EVERY[plant], seed) for seed in range(20)]
    runs = [planted(codec, PLANTS[plant], chance, rate, most_tokens) for chance in chances]
    found = [run.tokens for run in runs if run.report.figures.faults]
    figures = {
        "plant": plant,
        "audit_rate": rate,
        "runs": len(runs),
        "found": len(found),
        "tokens_to_the_fault": {"median": int(statistics.median(found)), "most": max(found)},
        "planted_per_1000_tokens": round(
            1000 * sum(chance.num_planted for chance in chances) / sum(run.tokens for run in runs), 2
        ),
    }
    record_summary(f"audit_{'_'.join(plant.split())}_{rate}", figures)
    assert len(found) == len(runs) and max(found) <= most_tokens, figures


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_nothing_is_found_in_200_000_tokens(codec: TextCodec, record_summary: Callable[..., None]) -> None:
    served = serve_audited(audited_config(1.0), codec, 1, 200_000)
    figures = served.report.figures
    record_summary("audit_200000", msgspec.structs.asdict(figures))
    assert served.tokens >= 200_000 and figures.tokens > 180_000, "a full backlog drops a few requests"
    assert not figures.faults and not served.report.recent and not figures.control_differences


LETTERS = Grammar(GrammarKind.REGEX, r"([ab]{3}[01]){20}")  # longer than its replies
Change = Callable[[Ring], None]


async def constrained(
    codec: TextCodec, grammars: list[Grammar], change: Change, method: str = "EAGLE3", family: str = "llama"
) -> AuditReport:
    """Serve a request of each grammar, greedy and drawn, with every one audited."""
    config = RingConfig(method=method, family=family, grammars=True, max_len=200, audit=ALL)
    async with running(tiny_loaded(0, config.num_steps, method=method, family=family), config, codec) as ring:
        change(ring)
        requests = [
            SamplingParams(max_new_tokens=48, temperature=temperature, seed=7, grammar=grammar)
            for grammar in grammars
            for temperature in (0.0, 1.0)
        ]
        await asyncio.gather(*(ring.ask([11, 40, 71, 9], each) for each in requests))
        await ring.idle()
        grammars = grammars_of(ring.executor).grammars
        async with asyncio.timeout(30):  # the last message to the worker is on its way
            while len(grammars):
                await asyncio.sleep(0.005)
        return ring.auditor.report()


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "family"),
    [
        *((method, "llama") for method in ("EAGLE3", "NGRAM", "STANDALONE")),
        pytest.param(OWN_LAYER, "glm 4.5", marks=pytest.mark.full),
    ],
)
def test_requests_with_grammars_are_audited(codec: TextCodec, method: str, family: str) -> None:
    grammars = [*TINY_GRAMMARS.values()][:: 2 if method == "EAGLE3" else 1]
    report = asyncio.run(constrained(codec, grammars, lambda ring: None, method, family))
    assert report.figures.requests == 2 * len(grammars) and report.figures.tokens > 20 * len(grammars)
    assert not report.recent and not report.skipped_because and not report.dropped_because


def test_a_grammar_begins_again_where_its_audit_does(codec: TextCodec) -> None:
    """After the audit has lost its pages."""

    async def serve() -> AuditReport:
        config = RingConfig(grammars=True, max_len=200, audit=ALL)
        async with running(tiny_loaded(0, config.num_steps), config, codec) as ring:
            audits = audits_of(ring.scheduler)
            await ring.ask([11, 40, 71, 9], SamplingParams(max_new_tokens=24, temperature=1, seed=7, grammar=LETTERS))
            async with asyncio.timeout(30):
                while not (audits.running and len(audits.running[0].drawn) > 3):
                    await asyncio.sleep(0)
            audits.give_back()
            await ring.idle()
            assert audits.num_restarts == 1
            return ring.auditor.report()

    report = asyncio.run(serve())
    assert report.figures.tokens == 24 and not report.recent and not report.dropped_because


@pytest.mark.slow
def test_a_wrong_mask_is_a_fault(codec: TextCodec) -> None:
    """It forbids a token that the grammar allows, so every reply is still valid."""
    report = asyncio.run(constrained(codec, [LETTERS], lambda ring: forbid_a_token(ring.executor, Chance(2))))
    assert report.figures.faults > 0 and not report.dropped_because


def test_a_token_that_the_grammar_forbids_is_a_fault(codec: TextCodec) -> None:
    """It has no margin. What follows it is not compared: the grammar knows of no continuation."""

    def change(ring: Ring) -> None:
        finished = ring.auditor.finished

        def with_a_wrong_token(transcript: Transcript, finish: Finish) -> None:
            transcript.output[5] = FORBIDDEN
            finished(transcript, finish)

        ring.auditor.finished = with_a_wrong_token

    report = asyncio.run(constrained(codec, [LETTERS], change))
    assert report.dropped_because == {GRAMMAR_ENDED: 2} and report.figures.tokens == 2 * 6
    assert [(each.position, each.served, each.margin) for each in report.recent] == [(4 + 5, FORBIDDEN, None)] * 2
    assert report.figures.faults == 2


async def serve_a_wrong_token(
    codec: TextCodec, settings: AuditSettings, num_requests: int
) -> tuple[AuditReport, list[int]]:
    """Every second guess that is rejected is accepted. Returns the report, and the widths of later decode steps."""
    config = RingConfig(audit=settings)
    async with running(tiny_loaded(3, config.num_steps), config, codec) as ring:
        PLANTS["a rejected guess accepted"](ring.executor, Chance(2))
        sampling = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
        await ring.ask([7, 8, 9], sampling)
        await ring.idle()
        ring.plans.widths.clear()
        for _ in range(num_requests - 1):
            await ring.ask([7, 8, 9, 10], sampling)
        return ring.auditor.report(), sorted(ring.plans.widths)


def test_a_fault_is_written_with_all_that_reproduces_it_and_switches_speculation_off(
    codec: TextCodec, tmp_path: Path
) -> None:
    file = tmp_path / "audit" / "faults.jsonl"
    report, widths = asyncio.run(serve_a_wrong_token(codec, AuditSettings(1.0, "disable", str(file)), 3))
    assert widths == [1] and not report.figures.speculating
    record = msgspec.json.decode(file.read_bytes().splitlines()[0])
    assert record["engine"]["commit"] == THIS_CODE.commit
    assert record["prompt_ids"] == [7, 8, 9] and len(record["output_ids"]) == 16
    assert sum(record["step_tokens"]) == 16 and len(record["step_ids"]) == len(record["step_tokens"])
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


def test_stop_ends_the_engine(codec: TextCodec, tmp_path: Path) -> None:
    settings = AuditSettings(1.0, "stop", str(tmp_path / "faults.jsonl"))
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(serve_a_wrong_token(codec, settings, 1))
    assert caught.group_contains(AuditFault)

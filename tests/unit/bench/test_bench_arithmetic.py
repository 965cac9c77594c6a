"""The figures of a benchmark, exactly, from servers whose times and counts are scripted. No engine, no waiting."""

import asyncio
from typing import Any

import pytest
from support.scripted_generate import Answer, Call, ScriptedClient, ScriptedClock, scripted

from overlap_spec.bench import latency
from overlap_spec.bench.latency import measure_latency
from overlap_spec.bench.runs import Batch, Endpoint, _measure_chats, measure_batch, measure_first_token
from overlap_spec.bench.workload import GREEDY, SAMPLED, warm_up_prompts
from overlap_spec.messages import FinishKind, Stats

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
BATCH = Batch(PROMPTS, warm_up_prompts(PROMPTS, 1000), num_tokens=30)
WARM_UP = Call(7.0, (9, 9, 9))
ONE_TOKEN = tuple(map(Call, (0.5, 0.4, 0.3, 0.2, 0.6)))
GREEDY_CALLS = [
    *(WARM_UP, *ONE_TOKEN),
    *(Call(3.4, (10, 14, 12)), Call(3.0, (9, 13, 11))),
    Call(4.5),  # streamed
]


def measured(calls: list[Call], **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """A batch's figures, and what the server heard."""
    with scripted(calls, options.pop("num_busy", 0)) as (server, port):
        figures = asyncio.run(measure_batch(Endpoint("127.0.0.1", port, server.clock), BATCH, **options))
        assert next(server.calls, None) is None, "fewer calls than scripted"
        return figures, server.heard


def test_a_step_is_the_wall_less_the_smallest_one_token_call_over_the_largest_verify_count() -> None:
    figures, _ = measured(GREEDY_CALLS)
    assert figures["one_token_walls_s"] == [0.5, 0.4, 0.3, 0.2, 0.6] and figures["one_token_wall_s"] == 0.2
    assert [run["step_ms"] for run in figures["runs"]] == [228.5714, 215.3846]  # 3.2 s / 14, 2.8 s / 13
    assert [run["steps"] for run in figures["runs"]] == [14, 13]


def test_the_better_run_is_on_top_with_its_tokens_over_its_whole_wall() -> None:
    figures, _ = measured(GREEDY_CALLS)
    assert figures["wall_s"] == 3.0 and figures["step_ms"] == 215.3846
    assert figures["num_tokens"] == 90 and figures["tokens_per_second"] == 30.0
    assert [run["tokens_per_second"] for run in figures["runs"]] == [26.5, 30.0]
    assert figures["accept_length"] == 2.636  # 87 tokens after the prefill's, in 33 verify steps
    assert figures["streamed_tokens_per_second"] == 20.0
    assert figures["batch"] == 3 and "sampled" not in figures


def test_plain_decoding_has_a_step_for_every_token_after_the_first() -> None:
    figures, _ = measured([WARM_UP, *ONE_TOKEN, Call(6.0), Call(5.9), Call(9.0)])
    assert figures["steps"] == 29 and figures["step_ms"] == 196.5517  # 5.7 s / 29
    assert figures["accept_length"] == 0.0 and figures["tokens_per_second"] == 15.3


def test_every_way_of_sampling_follows_with_its_own_one_token_calls_and_one_run() -> None:
    first, second = ([WARM_UP, *map(Call, (0.6, 0.4, 0.5, 0.7, 0.6)), Call(wall, (20, 19, 20))] for wall in (4.4, 2.4))
    figures, heard = measured([*GREEDY_CALLS, *first, *second], sampled=SAMPLED)
    assert figures["step_ms"] == 215.3846
    rows = figures["sampled"]
    assert [(row["temperature"], row["top_p"]) for row in rows] == [(1.0, 1.0), (0.7, 0.9)]
    assert [row["step_ms"] for row in rows] == [200.0, 100.0]
    assert [row["tokens_per_second"] for row in rows] == [20.5, 37.5]
    assert [row["accept_length"] for row in rows] == [1.475, 1.475] and all(len(row["runs"]) == 1 for row in rows)
    drawn = [body["sampling_params"][0]["temperature"] for body in heard if body != "flush"]
    assert drawn == [0.0] * 9 + [1.0] * 7 + [0.7] * 7


def test_a_batch_draws_by_seeds_of_its_own_and_goes_on_past_the_end_of_turn() -> None:
    _, heard = measured(GREEDY_CALLS)
    run = heard[-3]
    assert run["input_ids"] == PROMPTS and not run["stream"] and heard[-1]["stream"]
    expected = {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 30, "ignore_eos": True}
    assert run["sampling_params"] == [expected | {"sampling_seed": row} for row in range(3)]


def test_caches_are_emptied_before_every_call_and_nothing_measured_warms_up() -> None:
    _, heard = measured(GREEDY_CALLS)
    assert heard[::2] == ["flush"] * len(GREEDY_CALLS) and "flush" not in heard[1::2]
    bodies = heard[1::2]
    assert bodies[0]["input_ids"] == BATCH.warm_up and all(body["input_ids"] == PROMPTS for body in bodies[1:])
    assert [len(prompt) for prompt in BATCH.warm_up] == [3, 2, 4]
    assert not any(prompt in PROMPTS for prompt in BATCH.warm_up)


def test_a_busy_engine_is_asked_again_before_the_clock_starts() -> None:
    figures, heard = measured(GREEDY_CALLS, num_busy=2)
    assert heard[:3] == ["flush"] * 3 and heard[3] != "flush"
    assert figures["step_ms"] == 215.3846


def test_first_tokens_are_timed_to_the_first_event_and_their_median_is_told() -> None:
    calls = [Call(9.0, first=5.0), *(Call(8.0, first=first) for first in (0.4, 0.1, 0.2, 0.7))]
    prompts = [[row] * 6 for row in range(4)]
    with scripted(calls) as (server, port):
        endpoint = Endpoint("127.0.0.1", port, server.clock)
        figures = asyncio.run(measure_first_token(endpoint, prompts, warm_up=[[50] * 6]))
    assert figures["first_token_ms_median"] == 300.0
    assert figures["first_token_ms_min"] == 100.0 and figures["first_token_ms_max"] == 700.0
    assert figures["num_requests"] == 4 and figures["prompt_tokens"] == 6
    asked = [body["input_ids"] for body in server.heard if body != "flush"]
    assert asked == [[[50] * 6], *([prompt] for prompt in prompts)] and server.heard[::2] == ["flush"] * 5


CHATS = [
    Answer(9.0, 90.0, 500, 100, FinishKind.LENGTH),  # warms up
    Answer(0.5, 2.5, 21, 10, FinishKind.STOP),
    Answer(0.1, 1.1, 11, 5, FinishKind.STOP),
    Answer(0.3, 6.4, 68, 15, FinishKind.LENGTH),
]


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted engine settles at once."""
    sleep = asyncio.sleep
    monkeypatch.setattr(latency.asyncio, "sleep", lambda seconds: sleep(0))


@pytest.mark.usefixtures("at_rest")
def test_figures_of_chats() -> None:
    clock = ScriptedClock()
    client = ScriptedClient(iter(CHATS), clock)
    figures = asyncio.run(measure_latency(client, ["a", "b", "c"], GREEDY.params(68), "warm", clock))
    assert client.heard == ["warm", "flush", "a", "b", "c"]
    assert figures["num_tokens"] == 100 and figures["seconds"] == 10.0 and figures["tokens_per_second"] == 10.0
    assert figures["num_ended"] == 2 and figures["num_prompts"] == 3
    assert [sampling.max_new_tokens for sampling in client.sampling] == [24, 68, 68, 68]
    assert figures["ended_tokens_per_second"] == 8.89  # 32 tokens in 3.6 s
    assert figures["step_ms"] == 303.3333  # 9.1 s in 30 steps
    assert figures["first_token_ms_median"] == 300.0
    assert figures["accept_length"] == 3.2333  # 97 tokens after the prefill's
    assert [row["ended"] for row in figures["requests"]] == [True, True, False]


@pytest.mark.usefixtures("at_rest")
def test_chats_that_never_end_have_no_speed_of_those_that_did() -> None:
    clock = ScriptedClock()
    client = ScriptedClient(iter([CHATS[0], CHATS[3]]), clock)
    figures = asyncio.run(measure_latency(client, ["a"], GREEDY.params(68), "warm", clock))
    assert figures["num_ended"] == 0 and figures["ended_tokens_per_second"] is None


@pytest.mark.usefixtures("at_rest")
def test_chats_are_answered_in_every_way_of_sampling() -> None:
    engine = type("Engine", (), {"client": ScriptedClient(iter(CHATS * 3), ScriptedClock())})
    figures = asyncio.run(_measure_chats(engine, ["a", "b", "c"], "warm", (GREEDY, *SAMPLED), 68))
    assert [(row["temperature"], row["top_p"]) for row in figures["sampled"]] == [(1.0, 1.0), (0.7, 0.9)]
    asked = [(sampling.temperature, sampling.top_p, sampling.seed) for sampling in engine.client.sampling[::4]]
    assert asked == [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 0.9, 0)]
    assert figures["num_ended"] == 2 and all(row["num_ended"] == 2 for row in figures["sampled"])


def test_the_first_token_of_plain_decoding_is_no_decode_step() -> None:
    rows = [latency.RequestTimes(num_tokens=5, first_token=1.0, total=5.0, verify_steps=0, ended=True)]
    assert latency._figures(rows)["step_ms"] == 1000.0


def test_prompts_that_warm_up_are_as_long_as_those_measured() -> None:
    assert [len(prompt) for prompt in warm_up_prompts([[1, 2], [3]], 100)] == [2, 1]


def test_guesses_are_counted_by_position() -> None:
    before = Stats(verify_steps_total=10, accepted_per_position_total=(9, 4))
    after = Stats(verify_steps_total=18, accepted_per_position_total=(13, 6, 1))
    assert latency.accepted_by_position(before, after) == [0.5, 0.25, 0.125]
    assert latency.accepted_by_position(Stats(), after) == [0.7222, 0.3333, 0.0556]
    assert latency.accepted_by_position(after, after) == [0.0, 0.0, 0.0]

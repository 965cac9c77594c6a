"""The client when the other end misbehaves, is silent, or is declared dead."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest
from support.client_harness import ScriptedTokenizer, with_script

from overlap_spec.client import Client
from overlap_spec.client.calls import error_of
from overlap_spec.errors import ActorDied, OverlapSpecError, Overloaded, RequestAborted, RequestError, RequestFailed
from overlap_spec.messages import (
    Cancel,
    ErrorCode,
    Finish,
    FinishKind,
    Generate,
    GetStats,
    Ping,
    Pong,
    Rejected,
    Stats,
    StatsReply,
    TextDeltas,
    Tokenize,
    Usage,
)

USAGE = Usage(1, 0, 1, 0)
DONE = Finish(FinishKind.LENGTH)


def row(request_id: str, text: str, finish: Finish | None = None) -> TextDeltas:
    return TextDeltas([request_id], [text], [[1]], [finish], [USAGE])


async def failed_with(work: Awaitable[object], kind: type[OverlapSpecError]) -> OverlapSpecError:
    with pytest.raises(kind) as caught:
        await work
    return caught.value


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.BAD_REQUEST, RequestError),
        (ErrorCode.OVERLOADED, Overloaded),
        (ErrorCode.STARTING, Overloaded),
        (ErrorCode.SHUTTING_DOWN, Overloaded),
        (ErrorCode.FAILED, RequestFailed),
    ],
)
def test_what_each_refusal_becomes(tmp_path: Path, code: ErrorCode, kind: type[OverlapSpecError]) -> None:
    async def story(tokenizer: ScriptedTokenizer, client: Client) -> None:
        call = asyncio.create_task(client.complete("x"))
        request = await tokenizer.heard(Generate)
        tokenizer.say(Rejected(request.request_id, code, "because", "top_p"))
        error = await failed_with(call, kind)
        assert "because" in str(error)
        assert getattr(error, "field", "top_p") == "top_p"

    with_script(story, tmp_path)


def test_a_slow_consumer_delays_nobody(tmp_path: Path) -> None:
    async def story(tokenizer: ScriptedTokenizer, client: Client) -> None:
        slow = client.generate("slow", request_id="slow")
        first = asyncio.create_task(anext(slow))
        await tokenizer.heard(Generate)
        for index in range(500):
            tokenizer.say(row("slow", f"{index} "))
        tokenizer.say(row("slow", "end", DONE))
        begin = (await first).text  # and it asks for no more
        quick = asyncio.create_task(client.complete("quick", request_id="quick"))
        await tokenizer.heard(Generate)
        tokenizer.say(row("quick", "done", DONE))
        assert (await quick).text == "done"
        rest = [delta.text async for delta in slow]
        assert "".join((begin, *rest)) == "".join(f"{index} " for index in range(500)) + "end"
        assert len(rest) < 100, "what had come by then came as one delta"

    with_script(story, tmp_path)


def test_fail_ends_open_and_later_calls(tmp_path: Path) -> None:
    async def story(tokenizer: ScriptedTokenizer, client: Client) -> None:
        calls = [asyncio.create_task(client.complete("x")) for _ in range(3)]
        asking = asyncio.create_task(client.stats())
        await tokenizer.heard(GetStats)
        client.fail(ActorDied("worker", "killed by SIGKILL"))
        for call in (*calls, asking):
            assert "worker: killed by SIGKILL" in str(await failed_with(call, ActorDied))
        await failed_with(client.complete("later"), ActorDied)
        await failed_with(client.ping(), ActorDied)

    with_script(story, tmp_path)


def test_a_silent_tokenizer_ends_open_calls_and_the_client_goes_on(tmp_path: Path) -> None:
    async def story(tokenizer: ScriptedTokenizer, client: Client) -> None:
        call = asyncio.create_task(client.complete("x"))
        request = await tokenizer.heard(Generate)
        error = await failed_with(call, ActorDied)
        assert "tokenizer: no answer" in str(error)
        assert (await tokenizer.heard(Cancel)).request_id == request.request_id
        asking = asyncio.create_task(client.stats())
        question = await tokenizer.heard(GetStats)
        tokenizer.say(StatsReply(question.request_id, Stats(num_running=2)))
        assert (await asking).num_running == 2

    with_script(story, tmp_path, heartbeat_s=0.1, silence_s=0.3)


def test_heartbeats_are_sent_and_answers_keep_a_long_call_alive(tmp_path: Path) -> None:
    async def story(tokenizer: ScriptedTokenizer, client: Client) -> None:
        call = asyncio.create_task(client.complete("x", request_id="a"))
        for _ in range(8):
            ping = await tokenizer.heard(Ping)
            tokenizer.say(Pong(ping.sent_at, True, 1))
        assert not call.done()
        tokenizer.say(row("a", "late", DONE))
        assert (await call).text == "late"

    with_script(story, tmp_path, heartbeat_s=0.1, silence_s=0.3)


def test_a_new_session_ends_what_the_old_one_had_open(tmp_path: Path) -> None:
    async def story(tokenizer: ScriptedTokenizer, client: Client) -> None:
        ping = await tokenizer.heard(Ping)
        tokenizer.say(Pong(ping.sent_at, True, 7))
        call = asyncio.create_task(client.complete("x"))
        await tokenizer.heard(Generate)
        tokenizer.say(Pong(0.0, True, 7))
        await asyncio.sleep(0.05)
        assert not call.done()
        tokenizer.say(Pong(0.0, True, 8))
        assert "gave this client up" in str(await failed_with(call, RequestAborted))

    with_script(story, tmp_path)


def test_an_answer_of_the_wrong_kind_is_an_error(tmp_path: Path) -> None:
    async def story(tokenizer: ScriptedTokenizer, client: Client) -> None:
        asking = asyncio.create_task(client.tokenize("x"))
        question = await tokenizer.heard(Tokenize)
        tokenizer.say(StatsReply(question.request_id, Stats()))
        assert "StatsReply" in str(await failed_with(asking, ActorDied))

    with_script(story, tmp_path)


def test_a_message_that_cannot_be_read_fails_the_client(tmp_path: Path) -> None:
    async def story(tokenizer: ScriptedTokenizer, client: Client) -> None:
        call = asyncio.create_task(client.complete("x"))
        await tokenizer.heard(Generate)
        tokenizer.say(Stats())  # bad on purpose
        assert "cannot be read" in str(await failed_with(call, ActorDied))

    with_script(story, tmp_path)


def test_a_client_that_is_not_open_says_so() -> None:
    async def story() -> None:
        with pytest.raises(RuntimeError, match="not open"):
            await Client("ipc:///nowhere").stats()

    asyncio.run(story())


def test_closing_twice_and_opening_again(tmp_path: Path) -> None:
    async def story(tokenizer: ScriptedTokenizer, client: Client) -> None:
        await tokenizer.heard(Ping)
        await client.close()
        await client.close()
        await client.open()
        asking = asyncio.create_task(client.stats())
        question = await tokenizer.heard(GetStats)
        tokenizer.say(StatsReply(question.request_id, Stats()), client=2)
        await asking

    with_script(story, tmp_path)


def test_a_request_that_alone_has_failed_is_no_dead_engine() -> None:
    error = error_of(Rejected("r", ErrorCode.NOT_FINITE, "the logits are NaN"))
    assert isinstance(error, RequestFailed) and (error.code, str(error)) == ("not_finite", "the logits are NaN")

"""The client when the other end misbehaves, is silent, or is declared dead."""

import asyncio
import math
import socket
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from support.client_harness import ScriptedFrontend, with_script

from overlap_spec.client import Client
from overlap_spec.client.calls import error_of
from overlap_spec.config import LinkSettings
from overlap_spec.errors import ActorDied, OverlapSpecError, Overloaded, RequestAborted, RequestError, RequestFailed
from overlap_spec.frontend.frontend_actor import ClientEndpoint
from overlap_spec.messages import (
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
    async def story(frontend: ScriptedFrontend, client: Client) -> None:
        call = asyncio.create_task(client.complete("x"))
        request = await frontend.heard(Generate)
        frontend.say(Rejected(request.request_id, code, "because", "top_p"))
        error = await failed_with(call, kind)
        assert "because" in str(error)
        assert getattr(error, "field", "top_p") == "top_p"

    with_script(story, tmp_path)


def test_a_slow_consumer_delays_nobody(tmp_path: Path) -> None:
    async def story(frontend: ScriptedFrontend, client: Client) -> None:
        slow = client.generate("slow", request_id="slow")
        first = asyncio.create_task(anext(slow))
        await frontend.heard(Generate)
        for index in range(500):
            frontend.say(row("slow", f"{index} "))
        frontend.say(row("slow", "end", DONE))
        begin = (await first).text  # and it asks for no more
        quick = asyncio.create_task(client.complete("quick", request_id="quick"))
        await frontend.heard(Generate)
        frontend.say(row("quick", "done", DONE))
        assert (await quick).text == "done"
        rest = [delta.text async for delta in slow]
        assert "".join((begin, *rest)) == "".join(f"{index} " for index in range(500)) + "end"
        assert len(rest) < 100, "what had come by then came as one delta"

    with_script(story, tmp_path)


def test_fail_ends_open_and_later_calls(tmp_path: Path) -> None:
    async def story(frontend: ScriptedFrontend, client: Client) -> None:
        calls = [asyncio.create_task(client.complete("x")) for _ in range(3)]
        asking = asyncio.create_task(client.stats())
        await frontend.heard(GetStats)
        client.fail(ActorDied("worker", "killed by SIGKILL"))
        for call in (*calls, asking):
            assert "worker: killed by SIGKILL" in str(await failed_with(call, ActorDied))
        await failed_with(client.complete("later"), ActorDied)
        await failed_with(client.ping(), ActorDied)

    with_script(story, tmp_path)


def test_a_frontend_that_is_busy_ends_no_call(tmp_path: Path) -> None:
    """It reads nothing for far longer than a connection may be lost; ZeroMQ's threads keep the connection."""

    async def story(frontend: ScriptedFrontend, client: Client) -> None:
        call = asyncio.create_task(client.complete("x", request_id="a"))
        await frontend.heard(Generate)
        await asyncio.sleep(0.6)
        assert not call.done()
        frontend.say(row("a", "late", DONE))
        assert (await call).text == "late"

    with_script(story, tmp_path, heartbeat_s=0.02, lost_s=0.1)


def test_a_lost_connection_ends_open_calls_and_the_client_goes_on_with_the_next(tmp_path: Path) -> None:
    async def story() -> None:
        async with Client(f"ipc://{tmp_path}/client.sock", heartbeat_s=0.05, lost_s=0.3) as client:
            with listening(client.endpoint) as frontend:
                ping = await frontend.heard(Ping)
                frontend.say(Pong(ping.sent_at, True, 1))
                call = asyncio.create_task(client.complete("x"))
                await frontend.heard(Generate)
            error = await failed_with(call, ActorDied)
            assert "frontend: no connection to ipc://" in str(error) and "is it running" not in str(error)
            with listening(client.endpoint) as another:
                await another.heard(Ping)
                asking = asyncio.create_task(client.stats())
                question = await another.heard(GetStats)
                another.say(StatsReply(question.request_id, Stats(num_running=2)))
                assert (await asking).num_running == 2

    asyncio.run(story())


def test_a_client_that_is_told_judges_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with Client(f"ipc://{tmp_path}/client.sock", heartbeat_s=0.05, lost_s=math.inf) as client:
            with listening(client.endpoint) as frontend:
                call = asyncio.create_task(client.tokenize("x"))
                await frontend.heard(Tokenize)
            await asyncio.sleep(0.3)
            assert not call.done()
            client.frontend_died(ActorDied("frontend", "killed"))
            await asyncio.sleep(0.05)
            assert not call.done(), "another one may answer"
            client.fail(ActorDied("frontend", "hung: no heartbeat for 61.0 s"))
            assert "hung: no heartbeat" in str(await failed_with(call, ActorDied))

    asyncio.run(story())


@contextmanager
def listening(endpoint: str, own: str = "", api_key: str | None = None) -> Iterator[ScriptedFrontend]:
    """A scripted frontend that ends with the block. `own`: the address of the engine's client, if another."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = LinkSettings(client_endpoint=endpoint, api_key=api_key)
    try:
        with ClientEndpoint(context, link, own or endpoint) as bound:
            yield ScriptedFrontend(bound)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("peer", ["no process", "a stranger"])
def test_an_engine_that_is_not_there_is_named_with_what_to_look_for(peer: str) -> None:
    """The stranger's kernel takes the connection, and nothing is said."""

    async def story(endpoint: str) -> None:
        async with Client(endpoint, "a key", heartbeat_s=0.05, lost_s=0.3) as client:
            error = await failed_with(client.complete("x"), ActorDied)
            assert f"no connection to {endpoint}" in str(error)
            assert "is it running, and is the API key right?" in str(error)
        async with Client(endpoint, "a key") as client:
            waited = await failed_with(client.wait_ready(0.2), ActorDied)
            assert f"no answer from {endpoint}" in str(waited) and "is the API key right?" in str(waited)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        if peer == "a stranger":
            asyncio.run(story(endpoint))
    if peer == "no process":
        asyncio.run(story(endpoint))


def test_a_wrong_key_is_no_connection(tmp_path: Path) -> None:
    async def story() -> None:
        with listening("tcp://127.0.0.1:0", f"ipc://{tmp_path}/own.sock", "right") as frontend:
            address = frontend.endpoint.address
            async with Client(address, "wrong", heartbeat_s=0.05, lost_s=0.3) as client:
                error = await failed_with(client.complete("x"), ActorDied)
                assert "is it running, and is the API key right?" in str(error)
            async with Client(address, "right", heartbeat_s=0.05, lost_s=0.3) as client:
                call = asyncio.create_task(client.complete("x"))
                await frontend.heard(Generate)
                await asyncio.sleep(0.5)
                assert not call.done()
                call.cancel()

    asyncio.run(story())


def test_a_new_session_ends_what_the_old_one_had_open(tmp_path: Path) -> None:
    async def story(frontend: ScriptedFrontend, client: Client) -> None:
        ping = await frontend.heard(Ping)
        frontend.say(Pong(ping.sent_at, True, 7))
        call = asyncio.create_task(client.complete("x"))
        await frontend.heard(Generate)
        frontend.say(Pong(0.0, True, 7))
        await asyncio.sleep(0.05)
        assert not call.done()
        frontend.say(Pong(0.0, True, 8))
        assert "gave this client up" in str(await failed_with(call, RequestAborted))

    with_script(story, tmp_path)


def test_an_answer_of_the_wrong_kind_is_an_error(tmp_path: Path) -> None:
    async def story(frontend: ScriptedFrontend, client: Client) -> None:
        asking = asyncio.create_task(client.tokenize("x"))
        question = await frontend.heard(Tokenize)
        frontend.say(StatsReply(question.request_id, Stats()))
        assert "StatsReply" in str(await failed_with(asking, ActorDied))

    with_script(story, tmp_path)


def test_a_message_that_cannot_be_read_fails_the_client(tmp_path: Path) -> None:
    async def story(frontend: ScriptedFrontend, client: Client) -> None:
        call = asyncio.create_task(client.complete("x"))
        await frontend.heard(Generate)
        frontend.say(Stats())  # bad on purpose
        assert "cannot be read" in str(await failed_with(call, ActorDied))

    with_script(story, tmp_path)


def test_a_client_that_is_not_open_says_so() -> None:
    async def story() -> None:
        with pytest.raises(RuntimeError, match="not open"):
            await Client("ipc:///nowhere").stats()

    asyncio.run(story())


def test_closing_twice_and_opening_again(tmp_path: Path) -> None:
    async def story(frontend: ScriptedFrontend, client: Client) -> None:
        await frontend.heard(Ping)
        await client.close()
        await client.close()
        await client.open()
        asking = asyncio.create_task(client.stats())
        question = await frontend.heard(GetStats)
        frontend.say(StatsReply(question.request_id, Stats()), client=2)
        await asking

    with_script(story, tmp_path)


def test_a_request_that_alone_has_failed_is_no_dead_engine() -> None:
    error = error_of(Rejected("r", ErrorCode.NOT_FINITE, "the logits are NaN"))
    assert isinstance(error, RequestFailed) and (error.code, str(error)) == ("not_finite", "the logits are NaN")

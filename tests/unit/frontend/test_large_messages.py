"""A large message is counted before it is decoded: others are read meanwhile, and no turn of the loop is long."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.msgpack import encode
from support.longest_turn import longest_turn
from support.public_link import arrives, dealer, never, on_stage

from overlap_spec.client.link import ClientDealer, Gone, Malformed
from overlap_spec.frontend import client_router
from overlap_spec.frontend.client_messages import LARGE_BYTES, MOST_VALUES
from overlap_spec.frontend.frontend_actor import ClientEndpoint
from overlap_spec.messages import (
    Cancel,
    ChatPrompt,
    Generate,
    GenerateShared,
    Ping,
    SamplingParams,
    Shared,
    TextPrompt,
    Tokenize,
)

pytestmark = pytest.mark.usefixtures("no_collections")
TURN_S = 0.02  # of CPU time; the messages of 30 MiB took 25 to 115 ms
CONVERSATION = [{"role": "user", "content": "x"}] * 1_300_000
MANY = ChatPrompt([{"role": "user", "content": ["x"] * 250_000}])  # takes several turns to count


def chat(num_messages: int) -> Generate:
    messages = [{"role": "user", "content": "x" * 20}] * num_messages
    return Generate("chat", ChatPrompt(messages), SamplingParams(max_new_tokens=1))


def send_raw(client: ClientDealer, *payloads: bytes) -> None:
    client._duplex.socket.send_multipart(payloads, copy=False)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: encode(["Generate", "long", ["ChatPrompt", CONVERSATION], {}]), f"at most {MOST_VALUES} values"),
        (lambda: encode(["Generate", "long", ["TextPrompt", "é" * (15 << 20)], {}]), "bytes of text"),
        (lambda: encode(["Generate", "long", ["TokenPrompt", bytes(30 << 20)], {}]), "bytes of data"),
        (lambda: encode(["Generate", "long", ["TextPrompt", "x"], {"unknown": [1] * (30 << 20)}]), "values"),
        (lambda: encode(["Shared", [], [[1] * (1 << 20)] * 30]), "values"),
        (lambda: b"\x93\xa8Generate\xa4long" + b"\xc1" * (30 << 20), ""),
    ],
    ids=["conversation", "text", "ids", "unknown", "shared", "no message"],
)
def test_thirty_mib_of_anything_take_no_long_turn(tmp_path: Path, made: Callable[[], bytes], words: str) -> None:
    payload = made()

    async def scene(endpoint: ClientEndpoint) -> None:
        async with dealer(endpoint) as client:
            client.send(Ping(1.0))
            await arrives(endpoint.router)
            send_raw(client, payload)
            await asyncio.sleep(0.5)  # until ZeroMQ's thread has all of it
            with longest_turn() as longest:
                number, found = await arrives(endpoint.router)
            assert number == 1 and isinstance(found, Malformed) and words in found.error
            assert found.request_id == ("" if words == "values" and payload[1:8] == b"\xa6Shared" else "long")
            assert longest.seconds < TURN_S
            client.send(Ping(2.0))
            assert await arrives(endpoint.router) == (1, Ping(2.0)), "nothing is counted for the message after it"

    on_stage(scene, tmp_path)


@pytest.mark.slow  # 80 MB go through a socket
def test_messages_that_are_refused_unread_take_no_long_turn(tmp_path: Path) -> None:
    """There is room for one of them; of the others the head is read."""

    async def scene(endpoint: ClientEndpoint) -> None:
        payload = encode(["Generate", "long", ["ChatPrompt", CONVERSATION], {}])
        async with dealer(endpoint) as client, dealer(endpoint) as other:
            client.send(Ping(1.0))
            await arrives(endpoint.router)
            for _ in range(4):
                send_raw(client, payload)
            await asyncio.sleep(1.0)
            with longest_turn() as longest:
                assert isinstance((await arrives(endpoint.router))[1], Malformed)
                other.send(Ping(2.0))
                while (await arrives(endpoint.router))[1] != Ping(2.0):
                    pass
            assert longest.seconds < TURN_S

    on_stage(scene, tmp_path, max_client_bytes=40 << 20)


def test_others_are_read_while_a_message_is_counted_and_its_client_keeps_its_order(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as slow, dealer(endpoint) as quick:
            for number, client in enumerate((slow, quick), start=1):
                client.send(Ping(0.0))
                assert await arrives(router) == (number, Ping(0.0))
            slow.send(Generate("large", MANY, SamplingParams()))
            slow.send(Cancel("large"))
            for index in range(3):
                quick.send(Ping(float(index)))
            await asyncio.sleep(0.3)
            found = [await arrives(router) for _ in range(5)]
            assert found[:3] == [(2, Ping(float(index))) for index in range(3)]
            assert found[3:] == [(1, Generate("large", MANY, SamplingParams())), (1, Cancel("large"))]

    on_stage(scene, tmp_path)


def test_large_messages_of_many_clients_are_counted_in_turn(tmp_path: Path) -> None:
    """The one that is short is through first, although it has come last."""

    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as one, dealer(endpoint) as two, dealer(endpoint) as three:
            for client in (one, two, three):
                client.send(Ping(0.0))
                await arrives(router)
            for client in (one, two):
                client.send(Generate("many", MANY, SamplingParams()))
            await asyncio.sleep(0.1)
            three.send(Tokenize("text", TextPrompt("x" * 2 * LARGE_BYTES)))
            await asyncio.sleep(0.2)
            first, *others = [(await arrives(router))[0] for _ in range(3)]
            assert first == 3 and sorted(others) == [1, 2]  # sockets of their own: either may have come first

    on_stage(scene, tmp_path)


def test_what_requests_share_may_be_large(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with dealer(endpoint) as client:
            text = TextPrompt("x" * 2 * LARGE_BYTES)
            raw = encode(SamplingParams(max_new_tokens=3))
            shared = encode(Shared([text], [])).replace(b"\x90", b"\x91" + raw)
            send_raw(client, shared, *(encode(GenerateShared(f"r{i}", 0, 0)) for i in range(3)))
            found = [(await arrives(endpoint.router))[1] for _ in range(3)]
            assert [each.request_id for each in found if isinstance(each, Generate)] == ["r0", "r1", "r2"]
            assert all(isinstance(each, Generate) and each.prompt == text for each in found)

    on_stage(scene, tmp_path)


def test_a_client_that_leaves_while_its_message_is_counted_is_gone(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as client:
            client.send(Ping(0.0))
            await arrives(router)
            client.send(Generate("large", MANY, SamplingParams()))
            await asyncio.sleep(0.2)
            router._read(1)
            assert router._begins_count(*router._waiting.first) and router._counting
        assert isinstance((await arrives(router))[1], Gone)
        assert not router._counting and not router._waiting.of(1)
        await never(router.recv(), 0.1)

    on_stage(scene, tmp_path)


def test_large_frames_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with dealer(endpoint) as client:
            client.send(chat(2))
            client.send(Tokenize("text", TextPrompt("x" * 2 * LARGE_BYTES)))
            await asyncio.sleep(0.2)
            payloads = [found[1][0] for _ in range(2) if (found := endpoint.router._read_message())]
            assert [type(each) for each in payloads] == [bytes, memoryview]

    on_stage(scene, tmp_path)


def test_what_is_done_with_a_large_message_has_a_turn_of_its_own(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        turns: list[str] = []
        decode = client_router.ClientRouter._read_payload

        def noted(*arguments: object) -> object:
            turns.append("decoded")
            return decode(*arguments)

        async def tick() -> None:
            while turns[-1:] != ["read"]:
                if turns:
                    turns.append("another")
                await asyncio.sleep(0)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(client_router.ClientRouter, "_read_payload", noted)
            async with dealer(endpoint) as client:
                client.send(chat(5000))
                ticking = asyncio.create_task(tick())
                await arrives(endpoint.router)
                assert turns[0] == "decoded" and "another" in turns
                turns.append("read")
                await ticking

    on_stage(scene, tmp_path)

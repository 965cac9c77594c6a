"""Connections that send at once are parsed for some milliseconds of each turn of the event loop, all together."""

import asyncio
import json
import time

import pytest
from support.fake_engine_client import INFO, FakeClient, healthy

from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.http_server import HttpServer
from overlap_spec.entrypoints.protection import http_protocol
from overlap_spec.entrypoints.protection.http_protocol import TURN_BYTES, HttpProtocol, LoopTurns

PART_S = 0.002


class Clock:
    """Tells the CPU time that parsing has taken."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Connection:
    """Has so many parts to parse, each of which takes as long."""

    def __init__(self, turns: LoopTurns, name: str, parts: int, parsed: list[str], part_s: float = PART_S) -> None:
        self._turns, self._name, self._parts, self._parsed, self._part_s = turns, name, parts, parsed, part_s

    def parse(self) -> None:
        self._parsed.append(self._name)
        clock = self._turns._clock
        assert isinstance(clock, Clock)
        clock.now += self._part_s
        self._parts -= 1
        if self._parts:
            self._turns.wait(self)


def turns_of(*parts: int, part_s: float = PART_S) -> list[str]:
    """What is parsed in each turn of the loop, where connections a, b, .. have sent as many parts at once."""

    async def story() -> list[str]:
        turns, parsed, found = LoopTurns(Clock()), [], []
        connections = [Connection(turns, "abcdefgh"[i], n, parsed, part_s) for i, n in enumerate(parts)]
        for connection in connections:
            turns.take(connection)
        while len("".join(found)) < sum(parts):
            found.append("".join(parsed))
            parsed.clear()
            await asyncio.sleep(0)
        return found

    return asyncio.run(story())


def test_all_connections_share_the_time_of_a_turn() -> None:
    assert turns_of(1, 1, 1, 1, 1, 1, 1) == ["abc", "def", "g"]


def test_a_connection_has_one_part_in_a_turn_and_then_waits_behind_the_others() -> None:
    assert turns_of(3, 1, part_s=0.0) == ["a", "ab", "a"]
    assert turns_of(2, 2, 2, 2) == ["a", "abc", "dbc", "d"]


def test_a_new_turn_has_its_whole_time() -> None:
    async def story() -> None:
        turns, parsed = LoopTurns(Clock()), []
        for _ in range(3):
            assert [turns.take(Connection(turns, "a", 1, parsed)) for _ in range(3)] == [True] * 3
            await asyncio.sleep(0)
        assert len(parsed) == 9

    asyncio.run(story())


def test_what_leaves_is_not_parsed() -> None:
    async def story() -> list[str]:
        turns, parsed = LoopTurns(Clock()), []
        connections = [Connection(turns, name, 1, parsed, 0.1) for name in "abc"]
        assert [turns.take(each) for each in connections] == [True, False, False]
        assert [turns.waits(each) for each in connections] == [False, True, True]
        turns.leave(connections[1])
        turns.leave(connections[0])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return parsed

    assert asyncio.run(story()) == ["a", "c"]


def test_a_connection_that_fails_keeps_none_of_the_others_waiting() -> None:
    class Failing(Connection):
        def parse(self) -> None:
            raise RuntimeError

    async def story() -> list[str]:
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
        turns, parsed = LoopTurns(Clock()), []
        turns.take(Connection(turns, "a", 1, parsed, 0.1))
        turns.take(Failing(turns, "b", 1, parsed))
        turns.take(Connection(turns, "c", 1, parsed))
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(failures) == 1
        return parsed

    assert asyncio.run(story()) == ["a", "c"]


def test_bodies_of_many_connections_leave_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part takes a millisecond here. Sixteen connections together have a few in a turn of the loop."""
    parts = 0
    parse = HttpProtocol.parse

    def slow(protocol: HttpProtocol) -> None:
        nonlocal parts
        parts += 1
        until = time.thread_time() + 0.001
        parse(protocol)
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(HttpProtocol, "parse", slow)
    body = json.dumps({"prompt": "a" * 8 * TURN_BYTES}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async def story() -> int:
        server = HttpServer(create_app(FakeClient(), INFO, healthy), "127.0.0.1", 0)
        await server.start()
        streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(16)]
        for _, writer in streams:
            writer.write(request)
        answers = [asyncio.create_task(reader.readline()) for reader, _ in streams]
        most = 0
        while not all(answer.done() for answer in answers):
            before = parts
            await asyncio.sleep(0)
            most = max(most, parts - before)
        assert {await answer for answer in answers} == {b"HTTP/1.1 200 OK\r\n"}
        for _, writer in streams:
            writer.close()
        await server.stop(0.2)
        return most

    # What comes in a turn is parsed at its end, what waits at its begin.
    assert asyncio.run(story()) <= 2 * round(1 + http_protocol.TURN_S / 0.001)

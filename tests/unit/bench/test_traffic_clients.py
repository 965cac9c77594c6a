"""What clients send and when, against requests that answer by hand and against a server that answers by a script."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from overlap_spec.bench.traffic.arrivals import Arrival, Lengths, Poisson, with_rows
from overlap_spec.bench.traffic.client_process import Player
from overlap_spec.bench.traffic.figures import answered
from overlap_spec.bench.traffic.processes import Load, Played, Running, Target, play_load
from overlap_spec.bench.traffic.rate_search import Limits
from overlap_spec.bench.traffic.runs import Clients, Search, Traffic, run_against
from overlap_spec.bench.traffic.targets import Record, Request, sender_for
from overlap_spec.entrypoints.cli.bench_serve import line_of

GAP_S = 0.02


class Clock:
    """Seconds that pass only while something sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class Takes:
    """A request whose tokens come after given seconds, one each; it never ends if `hangs`."""

    def __init__(self, clock: Clock, *seconds: float, hangs: bool = False) -> None:
        self._clock = clock
        self._seconds = seconds
        self._hangs = hangs
        self.left = False

    async def send(self, record: Record) -> None:
        try:
            for total, seconds in enumerate(self._seconds, start=1):
                await self._clock.sleep(seconds)
                record.add(self._clock(), total)
            if self._hangs:
                await asyncio.Event().wait()
        finally:
            self.left = True


def test_a_request_is_sent_when_it_is_due_or_after_the_one_that_it_waits_for() -> None:
    clock = Clock()
    first = Arrival(id="first", at=2.0, prompt_len=1, output_len=2)
    after = Arrival(after="first", at=0.5, prompt=[1, 2, 3], output_len=1, tag="late")
    player = Player([(first, Takes(clock, 1.0, 3.0)), (after, Takes(clock, 1.0))], clock=clock, sleep=clock.sleep)
    asyncio.run(player.play(100.0))
    one, two = player.outcomes()
    assert (one.due_at, one.sent_at, list(one.arrival_times())) == (102.0, 102.0, [103.0, 106.0])
    assert (two.due_at, two.sent_at, list(two.arrival_times())) == (106.5, 106.5, [107.5])
    assert (two.tag, two.prompt_len, one.prompt_len) == ("late", 3, 1) and not one.stopped


class Counted:
    """A request that counts those that are open with it."""

    def __init__(self, is_open: list[int], most: list[int]) -> None:
        self._is_open = is_open
        self._most = most

    async def send(self, record: Record) -> None:
        self._is_open[0] += 1
        self._most[0] = max(self._most[0], self._is_open[0])
        for _ in range(5):
            await asyncio.sleep(0)
        self._is_open[0] -= 1


@pytest.mark.parametrize(("allowed", "seen"), [(None, 6), (1, 1), (4, 4), (9, 6)])
def test_no_more_requests_are_open_than_allowed(allowed: int | None, seen: int) -> None:
    is_open, most = [0], [0]
    arrivals = [Arrival(at=0.0, prompt_len=1, output_len=1) for _ in range(6)]
    player = Player([(each, Counted(is_open, most)) for each in arrivals], max_concurrency=allowed)
    asyncio.run(player.play(time.monotonic()))
    assert most == [seen] and len(player.outcomes()) == 6


def test_a_run_that_is_stopped_leaves_its_requests_and_keeps_what_came() -> None:
    clock = Clock()
    hanging, done, silent = Takes(clock, 1.0, hangs=True), Takes(clock, 1.0), Takes(clock, hangs=True)
    waiting = Arrival(after="a", at=0.0, prompt_len=1, output_len=1)
    arrivals = [Arrival(id=name, at=0.0, prompt_len=1, output_len=1) for name in "abc"]
    work: list[tuple[Arrival, Request]] = [
        *zip(arrivals, (hanging, done, silent), strict=True),
        (waiting, Takes(clock)),
    ]
    player = Player(work, slow_s=0.5, clock=clock)

    async def stop() -> None:
        playing = asyncio.create_task(player.play(100.0))
        await asyncio.sleep(0.01)
        clock.now += 1.0
        progress = player.progress()
        assert (progress.sent, progress.ended, progress.tokens, progress.num_slow) == (3, 1, 2, 3)
        assert len(progress.first_tokens) == 2 and player.progress().first_tokens == []
        playing.cancel()
        await asyncio.wait((playing,))

    asyncio.run(stop())
    first, second, third = player.outcomes()
    assert first.stopped and hanging.left and len(first.arrival_times()) == 1 and not second.stopped
    assert third.stopped and silent.left and not third.arrival_times()


def test_an_answer_may_end_the_run() -> None:
    clock = Clock()
    stream, last = Takes(clock, 1.0, hangs=True), Takes(clock, 1.0)
    arrivals = [Arrival(at=0.0, prompt_len=1, output_len=1, ends_run=ends) for ends in (False, True)]
    player = Player(list(zip(arrivals, (stream, last), strict=True)), clock=clock)
    asyncio.run(player.play(100.0))
    assert [each.stopped for each in player.outcomes()] == [True, False] and stream.left
    assert len(player.outcomes()[0].arrival_times()) == 1


Answering = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted(answer: Answering) -> AsyncGenerator[tuple[str, list[dict[str, Any]]], None]:
    """A server of one model. Yields its URL and the bodies of the completions it was asked for."""
    bodies: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if head.startswith(b"get /v1/models"):
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 23\r\n\r\n{"data":[{"id":"fox"}]}')
        else:
            length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            bodies.append(msgspec.json.decode(await reader.readexactly(length)))
            await answer(bodies[-1], writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", bodies


async def write_event(writer: asyncio.StreamWriter, data: bytes) -> None:
    payload = b"data: " + data + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(payload), payload))
    await writer.drain()


async def two_at_a_time(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Two tokens every GAP_S."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for tokens in range(2, body["max_tokens"] + 1, 2):
        await asyncio.sleep(GAP_S)
        await write_event(writer, b'{"choices":[{"text":"x"}],"usage":{"completion_tokens":%d}}' % tokens)
    await write_event(writer, b"[DONE]")
    writer.write(b"0\r\n\r\n")


async def busy(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull")


def test_requests_to_a_server_of_known_speed() -> None:
    arrivals = with_rows([Arrival(at=0.0, prompt_len=7, output_len=6, body={"top_p": 0.5}) for _ in range(4)])

    async def play() -> tuple[Player, list[dict[str, Any]]]:
        target = Target(url="", model="fox", vocab_size=50, body={"temperature": 1})
        async with (
            scripted(two_at_a_time) as (url, bodies),
            sender_for(msgspec.structs.replace(target, url=url)) as sender,
        ):
            player = Player([(arrival, sender.prepare(arrival, 0)) for arrival in arrivals])
            await player.play(time.monotonic())
            return player, bodies

    player, bodies = asyncio.run(play())
    for each in answered(player.outcomes()):
        assert each.outcome.tokens == 6 and len(each.gaps) == 2 and not each.outcome.error
        assert each.first_token >= 1000 * GAP_S and min(each.gaps) > 500 * GAP_S  # both at least, on a busy machine
        assert each.per_token == pytest.approx(sum(each.gaps) / 5)
    assert len({tuple(body["prompt"]) for body in bodies}) == 4
    for body in bodies:
        assert len(body["prompt"]) == 7 and body["model"] == "fox" and body["stream"] and body["ignore_eos"]
        assert (body["temperature"], body["top_p"], body["max_tokens"]) == (1, 0.5, 6)


def test_refused_requests_and_servers_that_are_not_there() -> None:
    arrival = with_rows([Arrival(at=0.0, prompt_len=7, output_len=6)])[0]

    async def play() -> list[Record]:
        records = [Record(), Record()]
        async with scripted(busy) as (url, _), sender_for(Target(url=url)) as sender:
            await sender.prepare(arrival, 0).send(records[0])
        await sender.prepare(arrival, 0).send(records[1])
        return records

    refused, missing = asyncio.run(play())
    assert (refused.error, refused.detail, missing.error) == ("HTTP 503", "full", "cannot connect")


def test_processes_share_a_load_and_are_stopped_together() -> None:
    """Requests at second 0, in both processes, and others that would be sent after a minute."""
    arrivals = [Arrival(at=60.0 * (n >= 4), prompt_len=3, output_len=6) for n in range(6)]

    def watch(running: Running) -> str:
        return "all have ended" if running.total("ended") == 4 else ""

    async def play() -> tuple[Played, int]:
        async with scripted(two_at_a_time) as (url, bodies):
            return await play_load(Load(Target(url=url), arrivals, num_processes=2), watch), len(bodies)

    played, asked = asyncio.run(play())
    assert asked == len(played.outcomes) == 4 and [each.tokens for each in played.outcomes] == [6] * 4
    assert (played.planned, played.stopped_because, len(played.cpu_shares)) == (6, "all have ended", 2)
    assert 0 < max(played.cpu_shares) < 1 and not any(each.stopped or each.error for each in played.outcomes)


@pytest.mark.full
def test_processes_play_a_search_and_stop_a_trial_that_has_failed() -> None:
    """Limits that no answer meets: the first trial is given up, and the time limit ends the search."""
    poisson = Poisson(20.0, Lengths(2.0, 0.5, 4, 20), Lengths(2.0, 0.0, 8, 8))
    limits = Limits(first_token_ms=1.0, tpot_ms=1.0)
    clients = Clients(num_processes=2, limit_s=3.0)
    shown: list[str] = []

    def show(what: str, running: Running) -> None:
        shown.append(line_of(what, running))

    async def play() -> dict[str, Any]:
        async with scripted(two_at_a_time) as (url, bodies):
            traffic = Traffic(poisson.arrivals(4, seed=0), clients, limits, Search(poisson, 10.0))
            report = await run_against(
                Target(url=url), traffic, lambda what, running: shown.append(line_of(what, running))
            )
            assert {body["model"] for body in bodies} == {"fox"}
            return report

    report = asyncio.run(play())
    found = report["server"]["search"]
    assert found["requests_per_second"] == 0.0 and not found["complete"] and report["server"]["model"] == "fox"
    trial = found["trials"][0]
    assert trial["rate"] == 20.0 and trial["planned"] == 200 and trial["sent"] < 200
    assert "first tokens are late" in trial["stopped_because"] and len(trial["client"]["cpu_shares"]) == 2
    assert all(len(line) <= 80 for line in shown) and any(line.startswith("20 requests/s") for line in shown)

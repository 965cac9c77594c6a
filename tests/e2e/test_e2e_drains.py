"""A drain goes on when processes die meanwhile: open streams end as they would have, and no new one begins."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from support.command_line import Service, wait_until_gone
from support.http_streams import NUM_TOKENS, Json, Round, bodies

from overlap_spec import Client, SamplingParams
from overlap_spec.errors import Overloaded

END_S = 120.0  # for the last process, on busy cores
DRAIN_S = 60
EVENTS = 100  # of all streams, after which the drain begins: those that wait for a slot have none yet
BETWEEN_S = 0.05  # between the drain's begin and a death
ASKED_EVERY_S = 0.1
REFUSED = "shutting down"
NEW: Json = {"model": "tiny", "messages": [{"role": "user", "content": "late"}], "max_tokens": 2}


class Latecomers:
    """New requests, over HTTP and ZMQ, one after the other until the server is gone."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.num_refused = 0
        self.taken: list[str] = []  # what was answered otherwise

    async def over_http(self) -> None:
        async with httpx.AsyncClient(base_url=self._service.url, timeout=60) as client:
            while True:
                try:
                    reply = await client.post("/v1/chat/completions", json=NEW)
                except httpx.HTTPError:
                    return
                self._note(
                    reply.status_code == 503 and "shutting down" in reply.text, f"{reply.status_code} {reply.text}"
                )
                await asyncio.sleep(ASKED_EVERY_S)

    async def over_zmq(self) -> None:
        async with Client(self._service.endpoint) as client:
            while self._service.process.poll() is None:
                try:
                    async with asyncio.timeout(2):
                        done = await client.complete("late", SamplingParams(max_new_tokens=2))
                    self._note(False, f"over ZMQ: {done}")
                except Overloaded as error:
                    self._note(REFUSED in str(error), str(error))
                except TimeoutError:
                    pass
                await asyncio.sleep(ASKED_EVERY_S)

    def _note(self, was_refused: bool, what: str) -> None:
        self.num_refused += was_refused
        if not was_refused:
            self.taken.append(what)


class Disturbance:
    """Sends SIGTERM and kills actors, the one before the other, and asks for more from then on."""

    def __init__(self, service: Service, roles: Sequence[str], number: int, drains_first: bool) -> None:
        self._service = service
        self._pids = [service.actors()[role] for role in roles]
        self._number = number
        self._drains_first = drains_first
        self.late = Latecomers(service)
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """While streams run."""
        loop = asyncio.get_running_loop()
        if self._drains_first:
            self._service.terminate()
            loop.call_later(BETWEEN_S, self._kill)
        else:
            self._kill()
            self._service.terminate()
        loop.call_later(2 * BETWEEN_S, self._ask)

    def _kill(self) -> None:
        for pid in self._pids:
            os.kill(pid, self._number)

    def _ask(self) -> None:
        self._tasks = [asyncio.create_task(asking) for asking in (self.late.over_http(), self.late.over_zmq())]

    async def ended(self) -> int:
        """The exit status of the server."""
        status = await asyncio.to_thread(self._service.process.wait, END_S)
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        return status


async def stream_over_zmq(endpoint: str) -> tuple[str, list[int]]:
    """Another process' client: it finds out by itself that there is another frontend."""
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, seed=9, temperature=0.8, ignore_eos=True)
    async with Client(endpoint) as client:
        done = await client.complete("over ZMQ", sampling)
    return done.text, done.token_ids


DEATHS = [
    (["frontend"], signal.SIGKILL, True),
    (["worker"], signal.SIGKILL, True),
    (["scheduler"], signal.SIGKILL, False),
    (["frontend"], signal.SIGSTOP, True),
    (["frontend", "worker"], signal.SIGKILL, True),
    (["frontend"], signal.SIGKILL, False),
    (["worker"], signal.SIGKILL, False),
    (["scheduler"], signal.SIGKILL, True),
    (["frontend"], signal.SIGSTOP, False),
    (["frontend", "worker"], signal.SIGKILL, False),
]


def name_of(case: object) -> str | None:
    match case:
        case [*roles]:
            return "+".join(map(str, roles))
        case bool():
            return "drain first" if case else "death first"
        case _:
            return None


@pytest.mark.full
@pytest.mark.parametrize(("roles", "number", "drains_first"), DEATHS, ids=name_of)
def test_a_drain_goes_on_when_processes_die(
    tmp_path: Path, tiny_flags: tuple[str, ...], roles: list[str], number: int, drains_first: bool
) -> None:
    """Fewer slots than streams: what waits, and has no token yet, was open before the drain, too."""

    async def scenario(service: Service) -> None:
        streams = Round(service.url).run(), stream_over_zmq(service.endpoint)
        wanted, wanted_over_zmq = await asyncio.gather(*streams)
        disturbance = Disturbance(service, roles, number, drains_first)
        disturbed = Round(service.url, EVENTS, disturbance.begin)
        got, over_zmq = await asyncio.gather(disturbed.run(), stream_over_zmq(service.endpoint))
        began = time.monotonic()
        assert await disturbance.ended() == 0
        assert time.monotonic() - began < DRAIN_S / 2, "it has noticed that nothing is open any more"
        for (_, body), ours, theirs in zip(bodies(), got, wanted, strict=True):
            assert ours == theirs, body
        assert over_zmq == wanted_over_zmq
        assert disturbance.late.taken == [] and disturbance.late.num_refused > 0

    endpoint = f"ipc://{tmp_path}/clients"
    flags = (
        *("--served-model-name", "tiny", "--tool-call-parser", "hermes", "--zmq-endpoint", endpoint),
        *("--watchdog-timeout", "5", "--drain-timeout", str(DRAIN_S), "--max-running-requests", "5"),
    )
    with Service(tmp_path, *tiny_flags, *flags) as service:
        asyncio.run(scenario(service))
        assert service.leftovers() == [] and wait_until_gone(list(service.actors().values()), END_S)

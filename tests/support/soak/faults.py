"""The faults of a soak. Each is there for a moment, and says what trouble it may cause meanwhile."""

import asyncio
import os
import resource
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random

import httpx
import msgspec
import zmq

from overlap_spec.client.link import pack_ids
from overlap_spec.messages import Generate, SamplingParams, TokenPrompt
from support.command_line import Service
from support.soak.clients import BROKEN, CUT
from support.soak.requests import prompt
from support.soak.spoiler import FILE, LONG_RUN, NAN_DRAFT, NAN_TARGET, OTHER_STEP

HELD_S = 1.0  # of a fault that lasts
PAIR, ALONE = ("scheduler", "worker"), ("frontend",)  # started again together, and alone
RECOVERED_S = 60.0  # that a recovery may take on a busy machine
A_LONG_RUN, ANOTHER_STEP = "a step result with a long run", "a step result of another step"
NO_TROUBLE: frozenset[str] = frozenset()
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


@dataclass
class Scene:
    """What a fault may touch. Counted: whole requests that faults have sent, and recoveries they have caused."""

    service: Service
    http: httpx.AsyncClient
    random: Random
    num_sent: int = 0
    num_recoveries: int = 0

    @property
    def pids(self) -> list[int]:
        return [self.service.process.pid, *self.service.actors().values()]


@dataclass(frozen=True)
class Fault:
    """`happen` begins it, and its exit ends it. `excused`: kinds of trouble of requests that were open meanwhile."""

    name: str
    happen: Callable[[Scene], AbstractAsyncContextManager[None]]
    excused: frozenset[str] = NO_TROUBLE


@asynccontextmanager
async def full_disk(scene: Scene) -> AsyncIterator[None]:
    """No process can write to a file: logs, faults of the audit, whatever else."""
    pids = scene.pids
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[pid][1]))
    try:
        yield
        await asyncio.sleep(HELD_S)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before[pid])


@asynccontextmanager
async def refused_sockets(scene: Scene) -> AsyncIterator[None]:
    """The HTTP server may open no further descriptor: new connections wait, or are closed."""
    pid = scene.service.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    held = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (held, before[1]))
    try:
        yield
        await asyncio.sleep(HELD_S)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@asynccontextmanager
async def reset_connections(scene: Scene) -> AsyncIterator[None]:
    """Clients that vanish with half a request sent, a third of them by a reset."""
    address = scene.service.url.removeprefix("http://").split(":")
    sockets = [socket.create_connection((address[0], int(address[1]))) for _ in range(40)]
    for number, connection in enumerate(sockets):
        with suppress(ConnectionError):
            connection.sendall(b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 50\r\n\r\n{"[: number * 2 + 1])
    yield
    await asyncio.sleep(HELD_S / 4)
    for number, connection in enumerate(sockets):
        if number % 3 == 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()


@asynccontextmanager
async def unread_streams(scene: Scene) -> AsyncIterator[None]:
    """Clients that ask for streams and read nothing of them."""
    address = scene.service.url.removeprefix("http://").split(":")
    sockets = []
    scene.num_sent += 8
    for _ in range(8):
        body = msgspec.json.encode({"input_ids": prompt(scene.random), "stream": True, "return_logprob": True})
        connection = socket.create_connection((address[0], int(address[1])))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        sockets.append(connection)
    yield
    await asyncio.sleep(HELD_S)
    for connection in sockets:
        connection.close()


@asynccontextmanager
async def vanishing_zmq_client(scene: Scene) -> AsyncIterator[None]:
    """A ZMQ client that begins requests and closes its socket without a word."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 100)
    client.connect(scene.service.endpoint)
    sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
    scene.num_sent += 12
    for number in range(12):
        asked = Generate(f"gone-{number}", TokenPrompt(pack_ids(prompt(scene.random))), sampling)
        client.send(msgspec.msgpack.encode(asked))
    yield
    await asyncio.sleep(HELD_S / 4)
    client.close()
    await asyncio.to_thread(context.term)


@asynccontextmanager
async def flood(scene: Scene) -> AsyncIterator[None]:
    """100 requests at once; they are answered or refused."""
    bodies = [
        {"input_ids": prompt(scene.random), "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        for _ in range(100)
    ]
    scene.num_sent += len(bodies)
    sent = [asyncio.create_task(scene.http.post("/generate", json=body)) for body in bodies]
    yield
    statuses = {reply.status_code for reply in await asyncio.gather(*sent)}
    assert statuses <= {200, 429, 503}, statuses


@asynccontextmanager
async def flushes(scene: Scene) -> AsyncIterator[None]:
    """The prefix cache is asked to be emptied while requests run: refused, or done."""
    yield
    for _ in range(20):
        reply = await scene.http.post("/flush_cache")
        assert reply.status_code in (200, 400, 503), reply.text


@asynccontextmanager
async def junk_frames(scene: Scene) -> AsyncIterator[None]:
    """A ZMQ client, and a connection, that send bytes without a meaning."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 100)
    client.connect(scene.service.endpoint)
    for _ in range(100):
        client.send_multipart([scene.random.randbytes(scene.random.randrange(40)) for _ in range(3)])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(scene.service.endpoint.removeprefix("ipc://"))
        connection.sendall(scene.random.randbytes(100))
    yield
    client.close()
    await asyncio.to_thread(context.term)


def ended(role: str, number: int) -> Callable[[Scene], AbstractAsyncContextManager[None]]:
    """A process gets a signal; the engine recovers, and requests go on."""

    @asynccontextmanager
    async def happen(scene: Scene) -> AsyncIterator[None]:
        before = scene.service.actors()
        os.kill(before[role], number)
        yield
        await recovered(scene, before, ALONE if role in ALONE else PAIR)

    return happen


def spoils(what: str, held_s: float) -> Callable[[Scene], AbstractAsyncContextManager[None]]:
    """The worker's module for faults does that; `held_s` 0: until the engine starts again."""

    @asynccontextmanager
    async def happen(scene: Scene) -> AsyncIterator[None]:
        file, before = scene.service.tmp_path / FILE, scene.service.actors()
        file.write_text(what)
        yield
        if held_s:
            await asyncio.sleep(held_s)
            file.unlink()
            return
        async with asyncio.timeout(RECOVERED_S):
            while scene.service.actors().get("worker") == before["worker"]:
                await asyncio.sleep(0.05)
        file.unlink()
        await recovered(scene, before)

    return happen


async def recovered(scene: Scene, before: dict[str, int], roles: Sequence[str] = PAIR) -> None:
    """Wait until these processes are others, and all are healthy, and then for a moment."""
    scene.num_recoveries += 1
    async with asyncio.timeout(RECOVERED_S):
        while not await is_recovered(scene, before, roles):
            await asyncio.sleep(0.1)
    await asyncio.sleep(HELD_S)


async def is_recovered(scene: Scene, before: dict[str, int], roles: Sequence[str]) -> bool:
    now = scene.service.actors()
    if any(now.get(role, before[role]) == before[role] for role in roles):
        return False
    return (await scene.http.get("/health")).status_code == 200


FAULTS = [
    Fault("full disk", full_disk),
    Fault("refused sockets", refused_sockets, frozenset({CUT})),
    Fault("reset connections", reset_connections),
    Fault("unread streams", unread_streams),
    Fault("a ZMQ client vanishes", vanishing_zmq_client),
    Fault("a flood", flood),
    Fault("flushes", flushes),
    Fault("junk frames", junk_frames),
    Fault("NaN of the draft", spoils(NAN_DRAFT, HELD_S)),
    Fault("NaN of the target", spoils(NAN_TARGET, HELD_S / 20), frozenset({BROKEN})),
]
HARSH = [  # the engine starts processes again, and requests go on
    Fault("the worker is killed", ended("worker", signal.SIGKILL)),
    Fault("the scheduler stops", ended("scheduler", signal.SIGSTOP)),
    Fault(A_LONG_RUN, spoils(LONG_RUN, 0.0)),
    Fault("the worker stops", ended("worker", signal.SIGSTOP)),
    Fault("the scheduler is killed", ended("scheduler", signal.SIGKILL)),
    Fault(ANOTHER_STEP, spoils(OTHER_STEP, 0.0)),
    Fault("the frontend is killed", ended("frontend", signal.SIGKILL)),
    Fault("the frontend stops", ended("frontend", signal.SIGSTOP)),
]

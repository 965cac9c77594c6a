"""Further attacks by what a client calls itself and its requests, and over ZMQ (rules 7, 8 and 9)."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from overlap_spec import SamplingParams
from overlap_spec.client.link import pack_ids
from overlap_spec.frontend.client_messages import (
    MOST_CONTAINERS,
    MOST_DATA_BYTES,
    MOST_ENTRIES,
    MOST_TEXT_BYTES,
    MOST_VALUES,
)
from overlap_spec.messages import Cancel, Flush, Generate, Rejected, TextDeltas, TokenPrompt
from support.attacks.attacker import Attacker
from support.attacks.case import Cases, all_the_same, answered, refused
from support.attacks.zmtp import empty_frames, more_frames

NAMES = Cases()


@NAMES.add(7, servers=("eagle3",), victim_rid="job-1", seconds=2)
async def ids_over_zmq(attacker: Attacker) -> str:
    """A request by the id of the victim's is answered, and ending it does not end the victim's."""
    async with attacker.dealer() as dealer:
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        for _ in range(5):
            dealer.send(Generate("job-1", TokenPrompt(pack_ids([5, 6])), params))
            async with asyncio.timeout(20):
                while not _ends(found := await dealer.recv(), "job-1"):
                    pass
            assert isinstance(found, TextDeltas), found
            dealer.send(Cancel("job-1"))
            dealer.send(Cancel("", everyone=True))
            dealer.send(Cancel("", everyone=True, key=attacker.server.key("attacker")))
            dealer.send(Flush("f", key="wrong"))
    return "its own answer"


def _ends(message: object, request_id: str) -> bool:
    """Whether it is the last one of this request."""
    if isinstance(message, TextDeltas):
        return request_id in message.request_ids and message.finishes[message.request_ids.index(request_id)] is not None
    return isinstance(message, Rejected) and message.request_id == request_id


@NAMES.add(7, servers=("ngram",), victim_rid="job-1", seconds=2)
async def aborts_of_every_form(attacker: Attacker) -> str:
    bodies = [
        {"rid": rid} for rid in ("job-1", "job", "job*", "*", "", "job-1\u0000", " job-1", "JOB-1", "attacker:job-1")
    ]
    bodies += [{"rid": f"{name}{mark}job-1"} for name in ("victim", "key victim") for mark in (":", "/", " ", "\u0000")]
    for body in bodies:
        reply = await attacker.post("/abort_request", body)
        assert reply.status in (200, 400, 403, 404), f"{body}: {reply.short()}"
    refused(await attacker.post("/abort_request", {"abort_all": True}), "", "--admin-api-key", status=403)
    for rid in ("job-1", "victim:job-1"):
        answered(await attacker.complete(rid=rid))
    for path in ("/audit", "/ui/timeline?steps=8", "/ui/live"):
        reply = await attacker.get(path)
        assert reply.status == 403 and "--admin-api-key" in reply.text, f"{path}: {reply.short()}"
    return "403 or nothing"


NEARLY = ("localhost.evil.example", "127.0.0.1.nip.io", "evil.example:30000", "evil.localhost.example", "x@y")
LOCAL = (
    "localhost",
    "LOCALHOST:1",
    "127.0.0.1:9",
    "[::1]:30000",
    "[::1]",
    "app.localhost:5173",
    "host.docker.internal",
)
ORIGINS = (
    "null",
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example:80",
    "https://evil.example:443",
    "file://",
)


@NAMES.add(8, servers=("open",), seconds=2)
async def hosts_and_origins_that_nearly_fit(attacker: Attacker) -> str:
    body = {"prompt": "x", "max_tokens": 1}
    for host in NEARLY:
        reply = await attacker.post("/v1/completions", body, headers={"host": host})
        assert reply.status in (400, 403), f"Host {host}: {reply.short()}"
    for origin in ORIGINS:
        reply = await attacker.post("/v1/completions", body, headers={"origin": origin})
        refused(reply, "", "--cors-allow-origins", status=403)
    for host in LOCAL:
        answered(await attacker.post("/v1/completions", body, headers={"host": host}))
    for origin in ("http://localhost:3000", "http://127.0.0.1:8080", "http://[::1]:5000"):
        answered(await attacker.post("/v1/completions", body, headers={"origin": origin, "content-type": "text/plain"}))
    return "403"


@NAMES.add(8, servers=("open",), seconds=2)
async def simple_requests_of_a_page(attacker: Attacker) -> str:
    """What a page sends without being asked whether it may: GETs without an Origin, and forms."""
    for path in ("/flush_cache", "/reset_prefix_cache", "/abort_request?abort_all=true", "/flush_cache?timeout=9"):
        reply = await attacker.get(path, headers={"sec-fetch-site": "cross-site"})
        assert reply.status in (403, 404, 405), f"{path}: {reply.short()}"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        for path in ("/abort_request", "/flush_cache", "/v1/completions"):
            headers = {"content-type": kind, "origin": "null"}
            refused(await attacker.post(path, {"abort_all": True}, headers=headers), "", status=403)
    return "403 or 405"


@NAMES.add(9, servers=("eagle3",), bounds_peak=True, answer_mib=30)
async def unfinished_messages_of_eight_peers(attacker: Attacker) -> str:
    """All of them may hold 96 MiB together, and sockets have their buffers."""
    host, port = attacker.zmq_address
    key = attacker.server.key("attacker")
    sending = (asyncio.to_thread(more_frames, host, port, key, 40, 4 << 20, 3.0) for _ in range(8))
    taken = await asyncio.gather(*sending)
    assert max(taken) < 40, f"frames of 4 MiB that were taken: {taken}"
    return "the connection closed"


@NAMES.add(9, servers=("ngram",), bounds_peak=True)
async def millions_of_empty_frames(attacker: Attacker) -> str:
    host, port = attacker.zmq_address
    taken = await asyncio.to_thread(empty_frames, host, port, attacker.server.key("attacker"), 4_000_000, 3.0)
    assert taken < 4_000_000, "all of them were taken"
    return "the connection closed"


SAMPLING = {"max_new_tokens": 1}


@NAMES.add(9)
async def shared_parts_of_40_peers(attacker: Attacker) -> str:
    """What requests share, which do not come: 30 MB of each connection. None of it may be kept."""
    prompt = ["TokenPrompt", bytes(4 * 7_500_000)]
    frame = msgspec.msgpack.encode(["Shared", [prompt], [SAMPLING]])
    async with AsyncExitStack() as stack:
        for _ in range(40):
            sender = stack.enter_context(attacker.frames())
            await asyncio.to_thread(sender.send, [frame])
        await asyncio.sleep(3)
    return "nothing"


@NAMES.add(1)
async def conversation_of_30_mib_over_zmq(attacker: Attacker) -> str:
    conversation = [{"role": "user", "content": "x"}] * 1_300_000
    frame = msgspec.msgpack.encode(["Generate", "long", ["ChatPrompt", conversation], SAMPLING])
    outcomes = []
    async for _ in attacker.for_seconds():
        outcomes.append(await attacker.send_frames([frame]))
    return all_the_same(outcomes)


@NAMES.add(1)
async def messages_at_their_bounds_over_zmq(attacker: Attacker) -> str:
    """Each has as much as is decoded at all, of what takes longest."""
    contents: list[Any] = [
        [f"abc{i}" for i in range(MOST_VALUES - 100)],
        {f"k{i}": "v" for i in range(MOST_ENTRIES - 10)},
        [[]] * (MOST_CONTAINERS - 10),
        "\u0436" * (MOST_TEXT_BYTES // 2 - 100),
    ]
    prompts = [["ChatPrompt", [{"role": "user", "content": content}]] for content in contents]
    prompts.append(["TokenPrompt", bytes(MOST_DATA_BYTES)])
    frames = [msgspec.msgpack.encode(["Generate", "long", prompt, SAMPLING]) for prompt in prompts]
    outcomes = []
    async for _ in attacker.for_seconds():
        outcomes += [await attacker.send_frames([frame]) for frame in frames]
    return all_the_same(outcomes)


@NAMES.add(3, servers=("ngram",), bounds_peak=True)
async def samplings_of_30_mib_over_zmq(attacker: Attacker) -> str:
    samplings = [{**SAMPLING, "logit_bias": {token: 0.5 + i for token in range(1024)}} for i in range(2000)]
    frame = msgspec.msgpack.encode(["Shared", [], samplings])
    outcomes = []
    async for _ in attacker.for_seconds():
        outcomes.append(await attacker.send_frames([frame[: 32 << 20]]))
    return all_the_same(outcomes)

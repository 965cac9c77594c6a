"""Clients of a soak: each sends a request over HTTP or ZMQ, and reports how it ended."""

import asyncio
import json
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from overlap_spec import Client
from overlap_spec.errors import ActorDied, OverlapSpecError, Overloaded, RequestAborted, RequestError
from overlap_spec.messages import SamplingParams
from support.soak.requests import Asked, Manner

ANSWER_S = 60.0  # what takes longer was not answered
ANSWERED, REFUSED, ENDED, BROKEN, CUT, SILENT = "answered", "refused", "ended", "broken", "cut", "silent"


@dataclass(frozen=True)
class Outcome:
    """How one request ended.

    answered | refused (400, 404, 503) | ended (its client left or asked for that) | cut (its connection was) |
    broken (an error of the server) | silent (no end in ANSWER_S). `tokens`: of answers that were read whole.
    """

    asked: Asked
    kind: str
    why: str = ""
    tokens: Any = None


@dataclass
class Tally:
    """Counts outcomes. `excused`: kinds of trouble that the fault of the moment may cause; other trouble is kept."""

    counts: Counter[str] = field(default_factory=Counter)
    by_path: Counter[str] = field(default_factory=Counter)
    excused: frozenset[str] = frozenset()
    num_excused: Counter[str] = field(default_factory=Counter)
    trouble: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome, excused: frozenset[str]) -> None:
        """`excused`: of the faults that were there while the request was open."""
        self.counts[outcome.kind] += 1
        self.by_path[outcome.asked.path] += 1
        if outcome.kind not in (BROKEN, CUT, SILENT):
            return
        if outcome.kind in excused:
            self.num_excused[outcome.kind] += 1
        else:
            self.trouble.append(outcome)


class Clients:
    """Sends requests to one service."""

    def __init__(self, url: str, zmq_client: Client) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self.http = httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits)
        self._zmq = zmq_client

    async def send(self, asked: Asked) -> Outcome:
        """Run one request to its end, or to where its client leaves."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await (self._over_zmq(asked) if asked.path == "zmq" else self._over_http(asked))
        except TimeoutError:
            return Outcome(asked, SILENT)
        except httpx.TimeoutException:
            return Outcome(asked, SILENT, "http")
        except (httpx.HTTPError, OSError) as error:
            return Outcome(asked, CUT, f"{type(error).__name__}: {error}")

    async def _over_http(self, asked: Asked) -> Outcome:
        if asked.body.get("stream") is True:
            return await self._stream(asked)
        reply = await self.http.post(asked.path, json=asked.body)
        return _of_reply(asked, reply.status_code, reply.content)

    async def _stream(self, asked: Asked) -> Outcome:
        aborting: asyncio.Task[Any] | None = None
        if asked.manner is Manner.ABORT:
            aborting = asyncio.create_task(self._abort_later(asked))
        try:
            async with self.http.stream("POST", asked.path, json=asked.body) as reply:
                if reply.status_code != 200:
                    return _of_reply(asked, reply.status_code, await reply.aread())
                return await self._events(asked, reply)
        finally:
            if aborting is not None:
                await aborting

    async def _events(self, asked: Asked, reply: httpx.Response) -> Outcome:
        """Read events. One that vanishes leaves after its delay, with the stream open."""
        events: list[Any] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(asked.delay_s if asked.manner is Manner.VANISH else None):
                async for line in reply.aiter_lines():
                    if line.startswith("data: "):
                        events.append(line[6:])
                        if asked.manner is Manner.SLOW:
                            await asyncio.sleep(asked.delay_s)
        if asked.manner is Manner.VANISH:
            return Outcome(asked, ENDED)
        if not events or events[-1] != "[DONE]":
            found = json.loads(events[-1]) if events else {}
            return _of_error(asked, found.get("error")) if "error" in found else Outcome(asked, CUT, "no last event")
        return Outcome(asked, ANSWERED, tokens=_streamed_tokens(asked, events[:-1]))

    async def _abort_later(self, asked: Asked) -> None:
        await asyncio.sleep(asked.delay_s)
        with suppress(httpx.HTTPError):
            await self.http.post("/abort_request", json={"rid": asked.rid})

    async def _over_zmq(self, asked: Asked) -> Outcome:
        try:
            sampling = msgspec.convert(asked.body["sampling"], SamplingParams)
            async with aclosing(self._zmq.generate(asked.body["prompt"], sampling, asked.rid)) as deltas:
                return await self._deltas(asked, deltas)
        except (RequestError, Overloaded) as error:
            return Outcome(asked, REFUSED, str(error))
        except RequestAborted as error:
            return Outcome(asked, ENDED if asked.manner is Manner.ABORT else BROKEN, str(error))
        except (ActorDied, OverlapSpecError) as error:
            return Outcome(asked, BROKEN, str(error))

    async def _deltas(self, asked: Asked, deltas: Any) -> Outcome:
        tokens: list[int] = []
        finish = None
        async for delta in deltas:
            tokens += delta.token_ids
            finish = delta.finish or finish
            if asked.manner is Manner.VANISH:
                return Outcome(asked, ENDED)
            if asked.manner is Manner.ABORT and finish is None:
                await self._zmq.cancel(asked.rid)
            if asked.manner is Manner.SLOW:
                await asyncio.sleep(asked.delay_s)
        return Outcome(asked, ANSWERED, tokens=[tokens])


def _of_reply(asked: Asked, status: int, content: bytes) -> Outcome:
    if status == 200:
        return Outcome(asked, ANSWERED, tokens=_tokens(asked, json.loads(content)))
    if status in (400, 404, 413, 429, 503):
        expected = asked.manner in (Manner.BAD, Manner.ABORT) or status in (429, 503)
        return Outcome(asked, REFUSED if expected else BROKEN, content.decode())
    return Outcome(asked, BROKEN, f"{status} {content.decode()[:300]}")


def _of_error(asked: Asked, error: Any) -> Outcome:
    if asked.manner is Manner.ABORT:
        return Outcome(asked, ENDED, str(error))
    return Outcome(asked, REFUSED if "503" in str(error) else BROKEN, str(error))


def _tokens(asked: Asked, reply: Any) -> Any:
    """Token ids of `/generate`, of each choice; None of other replies."""
    if asked.path != "/generate" or asked.manner is not Manner.READ:
        return None
    return [each["output_ids"] for each in (reply if isinstance(reply, list) else [reply])]


def _streamed_tokens(asked: Asked, events: list[Any]) -> Any:
    """The same of a stream, whose events hold all tokens of a choice so far."""
    if asked.path != "/generate" or asked.manner is not Manner.READ:
        return None
    whole = {event.get("index", 0): event["output_ids"] for event in map(json.loads, events)}
    return [whole[index] for index in sorted(whole)]

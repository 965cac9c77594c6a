"""What an attacker can do: requests with a key or without one, bytes on a socket, messages and frames over ZMQ."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import msgspec
import zmq

from overlap_spec.client.link import PLAIN_USER, ClientDealer
from overlap_spec.messages import Ping
from support.attacks.servers import AttackedServer
from support.command_line import Service

ANSWER_S = 120.0


@dataclass(frozen=True)
class Reply:
    """An answer. `seconds`: until it was whole."""

    status: int
    text: str
    seconds: float = 0.0

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        """Of OpenAI's shape or Anthropic's; empty for an answer that is none."""
        try:
            found = json.loads(self.text).get("error")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def short(self) -> str:
        return f"{self.status} {self.text[:300]}"


class Attacker:
    """One client with its own key. `seconds`: how long it goes on, where one request does not do."""

    def __init__(self, server: AttackedServer, service: Service, seconds: float) -> None:
        self.server, self.service, self.seconds = server, service, seconds
        address = urlsplit(service.url)
        self.host, self.port = str(address.hostname), int(address.port or 0)
        self._left = AsyncExitStack()

    async def __aenter__(self) -> "Attacker":
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        http = httpx.AsyncClient(base_url=self.service.url, timeout=ANSWER_S, limits=limits)
        self._http = await self._left.enter_async_context(http)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._left.aclose()

    def headers(self, key: str | None = None) -> dict[str, str]:
        """With the attacker's key; another one may be given, or "" for none."""
        key = self.server.key("attacker") if key is None else key
        return {"authorization": f"Bearer {key}"} if key else {}

    async def post(
        self, path: str, body: object, *, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """`body`: bytes as they are, or what is written as JSON."""
        content = body if isinstance(body, bytes) else await asyncio.to_thread(_encoded, body)
        given = {"content-type": "application/json", **self.headers(key), **(headers or {})}
        return await self._send("POST", path, given, content)

    async def get(self, path: str, *, key: str | None = None, headers: Mapping[str, str] | None = None) -> Reply:
        return await self._send("GET", path, {**self.headers(key), **(headers or {})}, b"")

    async def complete(self, **body: Any) -> Reply:
        """One request to /v1/completions."""
        return await self.post("/v1/completions", {"prompt": "x", "max_tokens": 1, **body})

    async def _send(self, method: str, path: str, headers: Mapping[str, str], content: bytes) -> Reply:
        begun = time.monotonic()
        try:
            reply = await self._http.request(method, path, headers=dict(headers), content=content)
        except httpx.HTTPError as error:
            return Reply(0, f"no answer: {error!r}", time.monotonic() - begun)
        return Reply(reply.status_code, reply.text, time.monotonic() - begun)

    @asynccontextmanager
    async def stream(self, **body: Any) -> AsyncIterator[httpx.Response]:
        """A streamed request to /v1/completions."""
        whole = {"prompt": "x", "stream": True, **body}
        async with self._http.stream("POST", "/v1/completions", json=whole, headers=self.headers()) as reply:
            yield reply

    @asynccontextmanager
    async def connection(self) -> AsyncIterator["RawConnection"]:
        """A socket of its own to the HTTP server."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            yield RawConnection(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    @asynccontextmanager
    async def dealer(self, key: str | None = None) -> AsyncIterator[ClientDealer]:
        """A ZMQ client, with the attacker's key."""
        dealer = ClientDealer(self.service.endpoint, self._zmq_key(key))
        try:
            yield dealer
        finally:
            await dealer.close()

    def frames(self) -> "FrameSender":
        """A ZMQ client that sends frames as they are, with the attacker's key."""
        return FrameSender(self.service.endpoint, self._zmq_key(None))

    async def send_frames(self, frames: list[bytes], timeout_s: float = 15.0) -> str:
        """One message from a client of its own, then a heartbeat. Returns what came before the answer to that one."""
        with self.frames() as sender:
            await asyncio.to_thread(sender.send, frames)
            return await asyncio.to_thread(sender.outcome, timeout_s)

    def _zmq_key(self, key: str | None) -> str | None:
        return (self.server.key("attacker") if key is None else key) or None

    @property
    def zmq_address(self) -> tuple[str, int]:
        host, _, port = self.service.endpoint.removeprefix("tcp://").rpartition(":")
        return host, int(port)

    async def for_seconds(self) -> AsyncIterator[float]:
        """Turns of an attack that goes on: seconds since its beginning. At least one turn."""
        begun = time.monotonic()
        while True:
            yield time.monotonic() - begun
            if time.monotonic() - begun > self.seconds:
                return
            await asyncio.sleep(0)


class FrameSender:
    """A ZMQ client that sends frames as they are. Leaving it drops what has not been sent."""

    def __init__(self, endpoint: str, key: str | None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        if key:
            self._socket.setsockopt(zmq.PLAIN_USERNAME, PLAIN_USER.encode())
            self._socket.setsockopt(zmq.PLAIN_PASSWORD, key.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._context.destroy(linger=0)

    def send(self, frames: list[bytes]) -> None:
        """One message."""
        self._socket.send_multipart(frames)

    def outcome(self, timeout_s: float) -> str:
        """Ask for a heartbeat. Returns what comes before it: an error, or that the connection was closed."""
        self._socket.send(msgspec.msgpack.encode(Ping(1.0)))
        found, deadline = "the connection closed", time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and self._socket.poll(1000 * left):
            if b"Pong" in self._socket.recv_multipart()[-1]:
                break
            found = "an error"
        return found


class RawConnection:
    """Bytes to the HTTP server, and what comes back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> bool:
        """False once the server has closed the connection."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError:
            return False
        return not self._writer.is_closing()

    async def read(self, timeout_s: float) -> bytes:
        """All that comes until the end or the time is up."""
        found = bytearray()
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                while data := await self._reader.read(1 << 16):
                    found += data
        return bytes(found)

    async def is_closed_within(self, timeout_s: float) -> bool:
        """Whether the server closes the connection."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self._reader.read(1 << 16):
                    pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True


def _encoded(body: object) -> bytes:
    return json.dumps(body).encode()

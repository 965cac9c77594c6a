"""Sends fuzzed cases to a running service, and fails if an answer is an error of the server or none at all."""

import contextlib
import json
import re
import socket
import time
from collections import Counter
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec
import zmq

from overlap_spec.client.link import LINGER_MS
from overlap_spec.messages import (
    Detokenized,
    DraftUpdated,
    FlushDone,
    Generate,
    GenerateShared,
    Ping,
    Pong,
    Rejected,
    StatsReply,
    TextDeltas,
    ToClient,
    ToFrontendFromClient,
    Tokenized,
)
from overlap_spec.messages.audit import AuditReply
from support.fuzz.http_cases import HttpCase

ANSWER_S = 30.0  # for an answer, on a machine that does other things too
ANTHROPIC = "/v1/messages"
READ_BYTES = 1 << 16
STATUS_OF = {"server_error": "500", "api_error": "500", "service_unavailable": "503", "timeout_error": "504"}
OVERLOADS = {"overloaded", "aborted"}  # codes of a 503


class HttpTarget:
    """Sends cases over HTTP. `statuses` counts the answers: a status, "closed" where there was none."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=ANSWER_S)
        self._address = url.removeprefix("http://").split(":")
        self.statuses: Counter[str] = Counter()

    def check(self, case: HttpCase) -> None:
        """Fail for an answer of 500 or more, for a reply that is no error where there is one, for silence.

        A 503 may tell of an overload, or that another request has aborted this one (`OVERLOADS`). A 504 is the answer
        to a request that asks for a `timeout` of its own.
        """
        status, code = self._send_raw(case.raw) if case.raw else self._send(case)
        self.statuses[f"{status} {code}" if status == "503" else status] += 1
        allowed = (status == "503" and code in OVERLOADS) or (status == "504" and b"timeout" in case.body)
        assert not status.startswith("5") or allowed, f"status {status} {code} of {case.method} {case.path}"

    def close(self) -> None:
        self._http.close()

    def _send(self, case: HttpCase) -> tuple[str, str]:
        """Status, and the code of an error."""
        reply = self._http.request(
            case.method, case.path, params=list(case.query) or None, headers=list(case.headers), content=case.body
        )
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            return _of_stream(reply.text)
        if reply.status_code >= 400 and case.path.startswith("/v1"):
            assert "error" in reply.json(), f"no error in {reply.text[:200]!r} of {case.path}"
        return str(reply.status_code), _code_of(reply.content) if reply.status_code == 503 else ""

    def _send_raw(self, raw: bytes) -> tuple[str, str]:
        """What a client gets that sends this and closes its half; a server may close without an answer."""
        with socket.create_connection((self._address[0], int(self._address[1])), timeout=ANSWER_S) as connection:
            answer = b""
            with contextlib.suppress(ConnectionError):
                connection.sendall(raw)
                connection.shutdown(socket.SHUT_WR)
                while (more := connection.recv(READ_BYTES)) and len(answer) < READ_BYTES:
                    answer += more
        found = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
        return (found[1].decode(), _code_of(answer)) if found else ("closed", "")


def _code_of(answer: bytes) -> str:
    found = re.search(rb'"code":"(\w+)"', answer)
    return found[1].decode() if found else ""


def _of_stream(text: str) -> tuple[str, str]:
    """The status of a stream that has begun: that of the error it ends with, if it does."""
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events, "a stream without an event"
    for event in events:
        if event != "[DONE]" and "error" in (found := json.loads(event)) and found["error"]:
            error = found["error"]
            return STATUS_OF.get(error.get("type"), "400"), str(error.get("code"))
    return "200", ""


class FrameTarget:
    """A client of the ZMQ link that sends frames as they are. `answers` counts what came back, by message."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(endpoint)
        self._of_client = msgspec.msgpack.Decoder(ToFrontendFromClient)
        self._of_engine = msgspec.msgpack.Decoder(ToClient)
        self._open: set[str] = set()
        self.answers: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()

    def check(self, frames: list[bytes]) -> None:
        """Send frames together, then a heartbeat; fail if that has no answer."""
        self._open |= {id for id in map(self._request_in, frames) if id}
        self._socket.send_multipart(frames)
        sent_at = time.monotonic()
        self._socket.send(msgspec.msgpack.encode(Ping(sent_at)))
        self._read_until(lambda message: isinstance(message, Pong) and message.sent_at == sent_at, "a heartbeat")

    def wait_for_the_open(self) -> None:
        """Fail if a request that was sent whole has not ended: finished, or been refused by its id."""
        if self._open:
            self._read_until(lambda message: not self._open, f"{sorted(self._open)[:5]}")

    def junk_connection(self, junk: bytes) -> None:
        """Bytes that are no ZMQ, over a connection of their own."""
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(ConnectionError):
            connection.connect(self._endpoint.removeprefix("ipc://"))
            connection.sendall(junk)

    def _request_in(self, frame: bytes) -> str:
        try:
            message = self._of_client.decode(frame)
        except Exception:  # whatever the bytes made the decoder say
            return ""
        return message.request_id if isinstance(message, Generate | GenerateShared) else ""

    def _read_until(self, found: Any, wanted: str) -> None:
        deadline = time.monotonic() + ANSWER_S
        while True:
            left = deadline - time.monotonic()
            assert left > 0 and self._socket.poll(1000 * left), f"no answer to {wanted} within {ANSWER_S:g} s"
            payload = self._socket.recv_multipart()[-1]
            if payload and found(self._note(self._of_engine.decode(payload))):
                return

    def _note(self, message: ToClient) -> ToClient:
        self.answers[type(message).__name__] += 1
        match message:
            case TextDeltas():
                ended = zip(message.request_ids, message.finishes, strict=True)
                self._open -= {id for id, finish in ended if finish is not None}
            case Rejected():
                self._open.discard(message.request_id)
            case Pong() | Tokenized() | Detokenized() | FlushDone() | StatsReply() | AuditReply() | DraftUpdated():
                pass
        return message

"""A `/generate` server, and a client, whose times and counts are scripted: they move a clock instead of waiting.

The clock is given to what is measured, and nothing else moves it.
"""

import json
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from overlap_spec.client.answers import Delta
from overlap_spec.messages import AuditReport, Finish, FinishKind, SamplingParams, Stats, Usage
from support.audit_reports import NOTHING_AUDITED

DEADLINE_S = 10.0  # real seconds


class ScriptedClock:
    """Seconds that only `advance` moves. Remembers how often it was read."""

    def __init__(self) -> None:
        self.num_reads = 0
        self._now = 1000.0
        self._changed = threading.Condition()

    def __call__(self) -> float:
        with self._changed:
            self.num_reads += 1
            self._changed.notify_all()
            return self._now

    def advance(self, seconds: float) -> None:
        with self._changed:
            self._now += seconds

    def advance_once_read(self, num_reads: int, seconds: float) -> None:
        """Advance when it has been read more often than that; a later reading sees the later time."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_reads > num_reads, DEADLINE_S)
            self._now += seconds


@dataclass(frozen=True)
class Call:
    """One answered call. `seconds`: to its end. `first`: to the first event of a stream, if the clock is read then."""

    seconds: float
    verify_counts: Sequence[int] = ()
    first: float = 0.0


@dataclass
class ScriptedServer:
    """Answers `calls` in their order. `heard`: the bodies and flushes that came, oldest first."""

    calls: Iterator[Call]
    clock: ScriptedClock
    num_busy: int = 0  # flushes that are refused first
    heard: list[dict[str, Any] | str] = field(default_factory=list)

    def answers(self, body: dict[str, Any], call: Call) -> list[dict[str, Any]]:
        """What a batch is told: as many tokens as it asked for, and the scripted verify counts."""
        metas = [{"completion_tokens": row["max_new_tokens"]} for row in body["sampling_params"]]
        for meta, count in zip(metas, call.verify_counts, strict=False):
            meta["spec_verify_ct"] = count
        return [{"meta_info": meta} for meta in metas]


@contextmanager
def scripted(calls: Sequence[Call], num_busy: int = 0) -> Iterator[tuple[ScriptedServer, int]]:
    """A running server, and its port."""
    server = ScriptedServer(iter(calls), ScriptedClock(), num_busy)
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, http.server_port
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def _handler(server: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            payload = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == "/flush_cache":
                return self._flush()
            body = json.loads(payload)
            server.heard.append(body)
            call = next(server.calls)
            if body["stream"]:
                return self._stream(call)
            server.clock.advance(call.seconds)
            self._reply(200, json.dumps(server.answers(body, call)).encode())

        def _flush(self) -> None:
            server.heard.append("flush")
            server.num_busy -= 1
            self._reply(200 if server.num_busy < 0 else 400, b"")

        def _stream(self, call: Call) -> None:
            self.send_response(200)
            self.end_headers()
            server.clock.advance(call.first)
            seen = server.clock.num_reads
            self.wfile.write(b'data: {"text": ""}\n\n')
            self.wfile.flush()
            if call.first:
                server.clock.advance_once_read(seen, call.seconds - call.first)
            else:
                server.clock.advance(call.seconds)
            self.wfile.write(b"data: [DONE]\n\n")

        def _reply(self, status: int, payload: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:
            """Write no log."""

    return Handler


@dataclass(frozen=True)
class Answer:
    """One answer of the scripted client. Times in seconds from sending."""

    first: float
    total: float
    num_tokens: int
    verify_steps: int
    finish: FinishKind


@dataclass
class ScriptedClient:
    """Gives `answers` in their order, each as two deltas. `heard`: prompts and flushes, oldest first."""

    answers: Iterator[Answer]
    clock: ScriptedClock
    heard: list[Any] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)
    totals: Stats = field(default_factory=Stats)

    async def generate(self, prompt: Any, sampling: SamplingParams) -> AsyncGenerator[Delta, None]:
        self.heard.append(prompt)
        self.sampling.append(sampling)
        answer = next(self.answers)
        self.clock.advance(answer.first)
        yield Delta("", [1], None, Usage(4, 0, 1, 0))
        self.clock.advance(answer.total - answer.first)
        yield Delta("", [], Finish(answer.finish), Usage(4, 0, answer.num_tokens, answer.verify_steps))
        self.totals = Stats(
            verify_steps_total=self.totals.verify_steps_total + answer.verify_steps,
            committed_tokens_total=self.totals.committed_tokens_total + answer.num_tokens - 1,
        )

    async def flush_cache(self) -> bool:
        self.heard.append("flush")
        return True

    async def audit(self) -> AuditReport:
        return NOTHING_AUDITED

    async def stats(self) -> Stats:
        return self.totals

"""A flood of bad requests writes a few lines: each kind is limited, counted, and shows its traceback once a minute."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from support.fake_engine_client import INFO, FakeClient, healthy

from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.http_server import HttpServer
from overlap_spec.runtime import log_limits
from overlap_spec.runtime.log_limits import BURST_OF_KIND, MOST_KINDS, LineLimits


class Lines(logging.Handler):
    """Keeps what would be written."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.addFilter(LineLimits())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler, root = Lines(), logging.getLogger()
    root.addHandler(handler)
    yield handler.lines
    root.removeHandler(handler)


def test_a_kind_is_cut_and_counted_and_others_are_not(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(log_limits.time, "monotonic", lambda: now)
    log = logging.getLogger("test.kinds")
    for number in range(1000):
        log.warning("client %d sent something malformed", number)
    assert len(lines) == BURST_OF_KIND
    log.error("client %d sent something malformed", 1)
    log.warning("something else")
    assert len(lines) == BURST_OF_KIND + 2
    now += 10.0
    log.warning("client %d sent something malformed", 5)
    assert lines[-1] == "client 5 sent something malformed (990 lines of this kind withheld before this one)"


def test_a_quiet_day_allows_no_more_than_a_burst(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(log_limits.time, "monotonic", lambda: now)
    log = logging.getLogger("test.quiet")
    log.warning("client %d sent something malformed", 0)
    now += 86400.0
    for number in range(1000):
        log.warning("client %d sent something malformed", number)
    assert len(lines) == 1 + BURST_OF_KIND


def test_a_traceback_is_shown_once_a_minute(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(log_limits.time, "monotonic", lambda: now)
    log = logging.getLogger("test.traces")

    def fail(text: str) -> None:
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("request %r failed", text)

    for word in ("one", "two\nlines"):
        fail(word)
    assert "Traceback" in lines[0] and lines[1] == "request 'two\\nlines' failed: ValueError: two lines"
    now += 61.0
    fail("three")
    assert "Traceback" in lines[2]


def test_kinds_are_forgotten_when_there_are_many() -> None:
    limits = LineLimits()
    for number in range(5 * MOST_KINDS):
        record = logging.LogRecord("test", logging.ERROR, "", 0, f"{number} is filled in by a library", None, None)
        assert limits.filter(record)
    assert len(limits._kinds) == MOST_KINDS


def test_a_flood_of_broken_requests_writes_a_few_lines(lines: list[str]) -> None:
    """Bytes that are no HTTP, and requests that meet a bug: each of those would have a traceback of 45 lines."""

    async def inner() -> None:
        server = HttpServer(create_app(FakeClient(), INFO, healthy), "127.0.0.1", 0)
        await server.start()
        bug = b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 18\r\n\r\n{"text": "a mute"}'
        for content in (b"\x16\x03\x01\x02\x00\r\n\r\n", bug) * 30:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(content)
            assert await reader.read(100)
            writer.close()
        await server.stop(0.1)

    asyncio.run(inner())
    shown = "\n".join(lines)
    assert shown.count("Invalid HTTP request") <= BURST_OF_KIND + 2
    assert shown.count("Traceback") <= 2 and shown.count("\n") < 150

"""Reading streamed answers: framing and counts however the bytes are cut, errors, and times by a given clock."""

import asyncio
from collections.abc import Iterator

import pytest

from overlap_spec.bench.traffic.targets import Answer, Chunks, CountedBy, Record, TokenCounter

FULL = b'data: {"error":{"message":"full"}}\n\n'
BUSY = [b'HTTP/1.1 503 Busy\r\ncontent-length: 20\r\n\r\n{"error":{"mes', b'sage":1}}']
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(tokens: int, text: str = "x") -> bytes:
    return b'data: {"choices":[{"text":"%s"}],"usage":{"completion_tokens":%d}}\n\n' % (text.encode(), tokens)


def bare(text: str = "x") -> bytes:
    return b'data: {"choices":[{"text":"%s"}],"usage":null}\n\n' % text.encode()


def total(tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % tokens


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


STREAM = event(1) + event(4, r"\"completion_tokens\":99") + event(4) + event(9) + total(9) + DONE


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_chunks_and_counts_do_not_depend_on_how_bytes_are_cut(size: int) -> None:
    framed = b"".join(chunk(part) for part in pieces(STREAM, 33)) + b"0\r\n\r\n"
    chunks, counter = Chunks(), TokenCounter()
    payloads = [chunks.feed(piece) for piece in pieces(framed, size)]
    assert b"".join(payloads) == STREAM and chunks.ended
    grew = [counter.tokens for payload in payloads if payload and counter.feed(payload)]
    assert counter.tokens == 9 and counter.counted_by is CountedBy.USAGE and counter.done and not counter.error
    assert grew == ([9] if size == 10_000 else [1, 4, 9]) or size == 50


def test_an_event_without_new_tokens_is_no_arrival() -> None:
    counter = TokenCounter()
    assert [counter.feed(each) for each in (event(1), event(1), event(3), total(3), DONE)] == [
        True, False, True, False, False,
    ]  # fmt: skip


def test_servers_without_running_usage_are_counted_by_events() -> None:
    counter = TokenCounter()
    assert [counter.feed(each) for each in (bare(), bare() + bare())] == [True, True]
    assert counter.tokens == 3 and counter.counted_by is CountedBy.EVENTS
    assert not counter.feed(total(7)) and counter.tokens == 7 and counter.counted_by is CountedBy.LAST_USAGE
    together = TokenCounter()
    assert together.feed(bare() + total(7) + DONE) and together.tokens == 7 and together.done


def test_spaces_in_json_and_line_breaks_of_two_characters() -> None:
    counter = TokenCounter()
    spaced = b'data: {"choices": [{"text": "x"}], "usage": {"completion_tokens": 12, "a": 1}}\r\n\r\n'
    assert counter.feed(spaced) and counter.tokens == 12 and counter.counted_by is CountedBy.USAGE
    assert counter.feed(spaced.replace(b"12", b"15")) and counter.tokens == 15


def test_native_events_are_cumulative() -> None:
    counter = TokenCounter()
    events = [b'data: {"text":"a","output_ids":[1],"meta_info":{"completion_tokens":%d}}\n\n' % n for n in (2, 5)]
    assert [counter.feed(each) for each in events] == [True, True] and counter.tokens == 5


def read(data: list[bytes], leaves: bool = True) -> tuple[Record, bool]:
    """An answer whose reads come a second apart, from second 1 on, and whether it has ended."""

    async def play() -> tuple[Record, bool]:
        seconds = iter(range(1, 100))
        record = Record()
        answer = Answer(b"", record, lambda: float(next(seconds)))
        for each in data:
            answer.data_received(each)
        if leaves:
            answer.connection_lost(None)
        return record, answer.ended.done()

    return asyncio.run(play())


def test_every_read_has_a_time_and_counts_once() -> None:
    reads = [HEAD[:20], HEAD[20:], chunk(event(2)), chunk(event(2)), chunk(event(5)) + chunk(event(9)), chunk(DONE)]
    record, ended = read(reads, leaves=False)
    assert ended and not record.error
    assert list(record.times) == [3.0, 5.0] and record.tokens == 9
    assert record.longest_gap == 2.0 and record.counted_by is CountedBy.USAGE


@pytest.mark.parametrize(
    ("data", "error", "detail"),
    [
        (BUSY, "HTTP 503", '{"error":{"message":1}}'),
        ([HEAD + chunk(event(2)) + chunk(FULL)], "error event", FULL.decode()),
        ([HEAD + chunk(event(2))], "connection lost", ""),
        ([HEAD + chunk(event(2)) + b"0\r\n\r\n"], "no [DONE]", ""),
        ([HEAD + b"zz\r\n"], "malformed answer", ""),
        ([HEAD[:10]], "connection lost", ""),
    ],
)
def test_errors_have_a_kind(data: list[bytes], error: str, detail: str) -> None:
    record, ended = read(data)
    assert ended and (record.error, record.detail) == (error, detail)

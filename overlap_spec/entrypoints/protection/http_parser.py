"""h11, which parses requests, with bounds on what it is given.

    a head     whole, up to HEAD_BYTES; its lines are counted before h11 looks at them
    a body     of a known length: up to its end. In chunks: CHUNKED_BYTES at a time, and the chunks are counted

h11's regular expressions take time quadratic in white space before a wrong character, so a run of it is bounded, too.
What is refused, or answered before its body has come, is parsed no further, and its answer ends the connection.
"""

import re
from typing import Any

import h11

from overlap_spec.entrypoints.http.errors import Problem

HEAD_BYTES = 16 << 10
MOST_HEADER_LINES = 128
BLANKS = 256  # spaces and tabs in a row
CHUNKED_BYTES = 512  # fed at once; so much may the head of a chunk, or the trailers, have
FREE_CHUNKS = 512  # of any size
MEAN_CHUNK_BYTES = 128  # of a body with more chunks
CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
END_OF_HEAD = re.compile(rb"\n\r?\n")
CLOSE = (b"connection", b"close")


class BoundedConnection(h11.Connection):
    """The server's end of a connection."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self.is_refused = False  # nothing of the request that is being received is parsed any more
        self._is_chunked_answer = False  # the head of an answer in chunks was the last that h11 has written
        self._num_left: int | None = 0  # bytes of the body that have not come; None: it comes in chunks
        self._num_chunks = self._num_payload = 0

    @property
    def parses(self) -> bool:
        """Whether it takes bytes now."""
        return not self.is_refused and self.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def has_part_of_head(self) -> bool:
        """Whether a request has begun to come."""
        return self.their_state is h11.IDLE and bool(self.trailing_data[0])

    # --- what is received ---

    def num_taken(self, arrived: bytearray, most: int) -> int:
        """How many of the bytes that have arrived are to be received now, at most `most`. Raises: Problem."""
        if self.their_state is h11.IDLE:
            return self._num_of_head(arrived, most)
        return min(most, len(arrived), CHUNKED_BYTES if self._num_left is None else self._num_left)

    def next_event(self) -> Any:
        """See h11."""
        event = super().next_event()
        if type(event) is h11.Request:
            lengths = [int(value) for name, value in event.headers if name == b"content-length"]
            in_chunks = any(name == b"transfer-encoding" for name, _ in event.headers)
            self._num_left = None if in_chunks else sum(lengths[:1])
            self._num_chunks = self._num_payload = 0
        elif type(event) is h11.Data:
            self._num_payload += len(event.data)
            self._num_chunks += event.chunk_start
            if self._num_left is not None:
                self._num_left -= len(event.data)
        return event

    def check_chunks(self) -> None:
        """Raises: Problem if the chunks that have come are too small, or one's head or the trailers too long."""
        if self.their_state is not h11.SEND_BODY or self._num_left is not None:
            return
        chunks, payload = self._num_chunks, self._num_payload
        if chunks > FREE_CHUNKS and payload < MEAN_CHUNK_BYTES * chunks:
            text = (
                f"the body: after {FREE_CHUNKS} chunks, chunks must have {MEAN_CHUNK_BYTES} bytes or more on average, "
                f"got {chunks} chunks with {payload} bytes together: send larger chunks, or a Content-Length"
            )
            raise Problem(400, text, code="small_chunks")
        if len(self.trailing_data[0]) > CHUNKED_BYTES:
            text = f"the body: the head of a chunk, or the trailers, may have {CHUNKED_BYTES} bytes, got more"
            raise Problem(431, text, code="large_chunk_head")

    def _num_of_head(self, arrived: bytearray, most: int) -> int:
        held = self.trailing_data[0]
        head = held + bytes(arrived[: max(0, min(most, HEAD_BYTES + 1 - len(held)))])
        end = END_OF_HEAD.search(head, max(0, len(held) - 3))
        if end is None and len(head) <= HEAD_BYTES:
            return len(head) - len(held)
        if end is None:
            raise Problem(431, f"the head of a request may have {HEAD_BYTES} bytes, got more", code="large_head")
        _check_head(head[: end.end()])
        return max(0, end.end() - len(held))

    # --- what is sent ---

    def send(self, event: Any) -> Any:
        """See h11, which checks each chunk of a streamed answer, though no state of it depends on them: not so here."""
        if self._is_chunked_answer and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        if type(event) is h11.Response and self.their_state in (h11.SEND_BODY, h11.ERROR):
            self.is_refused = True
            headers = [*(each for each in event.headers.raw_items() if each[0].lower() != CLOSE[0]), CLOSE]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        written = super().send(event)
        self._is_chunked_answer = type(event) is h11.Response and CHUNKED in written.lower()
        return written


def _check_head(head: bytes) -> None:
    """Raises: Problem for what takes h11 long."""
    lines = head.count(b"\n") - 2
    if lines > MOST_HEADER_LINES:
        text = f"the head of a request may have {MOST_HEADER_LINES} header lines, got {lines}"
        raise Problem(431, text, code="large_head")
    if head.replace(b"\t", b" ").find(b" " * BLANKS) >= 0:
        text = f"the head of a request may have fewer than {BLANKS} spaces in a row, got more"
        raise Problem(400, text, code="large_head")

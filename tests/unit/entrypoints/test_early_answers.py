"""Requests that are answered while their client still sends: every client reads its answer, none finds a reset.

python -m pytest tests/unit/entrypoints/test_early_answers.py -m slow --fuzz-cases 20000 --summaries FILE
"""

import asyncio
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from msgspec.structs import replace
from support.fake_engine_client import INFO, FakeClient, healthy

from overlap_spec.config import ApiKeys
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.http_server import HttpServer

CASES, AT_ONCE = 300, 8
MOST_BYTES = 100_000  # of a body that is taken
KEY = "x-api-key: k\r\n"
KINDS = {  # what is answered before the body: method and path, headers, least and most bytes of the body
    401: ("POST /v1/completions", "", 0, 400_000),
    405: ("DELETE /health", "", 0, 400_000),
    413: ("POST /v1/completions", KEY, MOST_BYTES + 1, 600_000),
}
LOCKED = replace(INFO, keys=ApiKeys({"k": "one"}), max_body_bytes=MOST_BYTES)


@contextmanager
def serving() -> Iterator[int]:
    """A server in a thread of its own. Yields its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        server = HttpServer(create_app(FakeClient(), LOCKED, healthy), "127.0.0.1", 0)
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
        yield server.port
        asyncio.run_coroutine_threadsafe(server.stop(0.2), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def answered(port: int, seed: int) -> str:
    """Send one request to its end, in pieces, then read. Returns what is wrong with the answer, or its status."""
    rng = random.Random(seed)
    status = rng.choice(list(KINDS))
    request, headers, least, most = KINDS[status]
    size = rng.choice([least, rng.randint(least, most)])
    ends = rng.choice(["", "Connection: close\r\n"])
    head = f"{request} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n{headers}{ends}\r\n".encode()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(head)
            time.sleep(rng.choice([0.0, 0.005]))  # the answer may be there before the body
            while size:
                piece = min(size, rng.choice([1_000, 20_000, 200_000]))
                client.sendall(b"x" * piece)
                size -= piece
            found = client.recv(1 << 16)
    except OSError as error:
        return f"{status}: {type(error).__name__}"
    return str(status) if found.startswith(f"HTTP/1.1 {status} ".encode()) else f"{status}: {found[:20]!r}"


@pytest.mark.slow
def test_an_early_answer_reaches_its_client(
    request: pytest.FixtureRequest, record_summary: Callable[..., None]
) -> None:
    cases, seed = int(request.config.getoption("--fuzz-cases") or CASES), int(request.config.getoption("--seed"))
    with serving() as port, ThreadPoolExecutor(AT_ONCE) as clients:
        seen = Counter(clients.map(lambda case: answered(port, seed * cases + case), range(cases)))
    record_summary("early_answers", {"cases": cases, "seed": seed, "answers": dict(sorted(seen.items()))})
    assert seen.keys() == {str(status) for status in KINDS}, seen

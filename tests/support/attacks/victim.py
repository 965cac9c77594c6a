"""A user of the server, in a process of its own, so that the attacker's work does not make it late.

It reads one stream, an event a step, and sends one small request after another. The first line of its input has where
and what, in JSON. For each further line it prints the worst waits since the line before: of the stream between two
events, of a small request until its answer. A wait that is not over counts.

It needs the standard library alone, and starts in a tenth of a second.
"""

import http.client
import json
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any

PAUSE_S = 0.03  # between two small requests
AGAIN_S = 0.2  # after a failure
SWITCH_S = 0.0002  # between its two readers: neither is late because the other one works
SILENCE_S = 40.0
TOKEN_IDS = [504, 2365, 282, 260, 905]


class Waits:
    """The longest time between two events. An event that is waited for begins with `begin`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._worst = 0.0
        self._num_events = 0

    def begin(self) -> None:
        """Of a request that follows one that failed, the wait has begun with that one."""
        with self._lock:
            self._since = time.monotonic() if self._since is None else self._since

    def event(self, more: bool) -> None:
        """What was waited for is there; `more`: the next wait begins."""
        with self._lock:
            now = time.monotonic()
            if self._since is not None:
                self._worst = max(self._worst, now - self._since)
            self._since, self._num_events = now if more else None, self._num_events + 1

    def take(self) -> tuple[float, int]:
        """The worst wait and the number of events since the last call."""
        with self._lock:
            now = time.monotonic()
            if self._since is not None:
                self._worst = max(self._worst, now - self._since)
                self._since = now
            taken = self._worst, self._num_events
            self._worst, self._num_events = 0.0, 0
            return taken


class Victim:
    """`asked`: host, port, key; `rid` of its streams or ""; `poll`: name of a function of `POLLS`."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._asked = asked
        self._address = asked["host"], asked["port"]
        self._headers = {"authorization": f"Bearer {asked['key']}"} if asked["key"] else {}
        self.stream, self.small = Waits(), Waits()
        self.errors: Counter[str] = Counter()

    def read_streams(self) -> None:
        """One after another; the time from the end of one to the first token of the next counts too."""
        while True:
            try:
                self._read_stream()
            except (OSError, ValueError) as error:
                self._note(f"stream: {error}")
                time.sleep(AGAIN_S)

    def _read_stream(self) -> None:
        body: dict[str, Any] = {"prompt": TOKEN_IDS, "max_tokens": 8000, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0, "rid": self._asked["rid"]} if self._asked["rid"] else {"temperature": 0}
        content, tail = json.dumps(body).encode(), b""
        head = [f"{name}: {value}\r\n" for name, value in self._headers.items()]
        request = f"POST /v1/completions HTTP/1.1\r\nhost: {self._address[0]}\r\nconnection: close\r\n{''.join(head)}"
        with socket.create_connection(self._address, timeout=SILENCE_S) as connection:
            connection.sendall(f"{request}content-length: {len(content)}\r\n\r\n".encode() + content)
            self.stream.begin()
            while data := connection.recv(1 << 16):
                if b"data: {" in data:
                    self.stream.event(more=True)
                if b'"error"' in data or b'"abort"' in data:
                    raise ValueError(data[-400:].decode(errors="replace"))
                tail = (tail + data)[-200:]
        if b"[DONE]" not in tail:
            raise ValueError(f"cut off after {tail.decode(errors='replace')}")

    def send_small_requests(self) -> None:
        """One after another, over a connection that is kept."""
        make, connection = POLLS[self._asked["poll"]], http.client.HTTPConnection(*self._address, timeout=SILENCE_S)
        while True:
            method, path, body = make()
            content = None if body is None else json.dumps(body).encode()
            self.small.begin()
            try:
                connection.request(method, path, content, self._headers)
                reply = connection.getresponse()
                text = reply.read()
                self.small.event(more=False)
                if reply.status != 200:
                    raise ValueError(f"{reply.status} {text[:300].decode(errors='replace')}")
            except (OSError, ValueError, http.client.HTTPException) as error:
                self._note(f"{path}: {error!r}")
                connection.close()
                time.sleep(AGAIN_S)
            time.sleep(PAUSE_S)

    def _note(self, error: str) -> None:
        """Errors that differ in numbers alone are counted together."""
        self.errors[re.sub(r"\d+\.\d+", "N", error)] += 1

    def report(self) -> dict[str, Any]:
        (stream_s, num_events), (small_s, num_small) = self.stream.take(), self.small.take()
        errors, self.errors = self.errors, Counter()
        return {
            "stream_s": stream_s,
            "num_events": num_events,
            "small_s": small_s,
            "num_small": num_small,
            "errors": dict(errors),
        }


Poll = tuple[str, str, Any]


def _health() -> Poll:
    return "GET", "/health", None


def _tokenize() -> Poll:
    words = " ".join(f"{random.choice('bcdfg')}{random.getrandbits(40):x}" for _ in range(3000))
    return "POST", "/tokenize", {"prompt": words[:36_000]}


def _grammar() -> Poll:
    """A grammar that no cache has."""
    pattern = f"[0-9]{{1,3}}{random.choice('abc')}{random.getrandbits(20):x}"
    return "POST", "/v1/completions", {"prompt": "x", "max_tokens": 2, "regex": pattern}


def _named() -> Poll:
    return "POST", "/v1/completions", {"prompt": "x", "max_tokens": 2, "rid": "nightly"}


POLLS = {"health": _health, "tokenize": _tokenize, "grammar": _grammar, "named": _named}


def main() -> None:
    sys.setswitchinterval(SWITCH_S)
    victim = Victim(json.loads(sys.stdin.readline()))
    for work in (victim.read_streams, victim.send_small_requests):
        threading.Thread(target=work, daemon=True).start()
    for _ in sys.stdin:
        print(json.dumps(victim.report()), flush=True)


if __name__ == "__main__":
    main()

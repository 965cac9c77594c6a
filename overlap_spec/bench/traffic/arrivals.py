"""The requests of a run and when they are sent: made, read from a JSON-lines file, or written to one.

{"at": 0.5, "prompt_len": 1200, "output_len": 150}
{"at": 0.7, "prompt": "The sky is", "output_len": 16, "body": {"temperature": 0.8}}
{"id": "first", "at": 0, "prompt_len": 8000, "output_len": 64, "row": 1}
{"after": "first", "at": 0.5, "prompt_len": 8200, "output_len": 64, "row": 1}

Those that are made are Poisson with lognormal lengths, a long prompt among streams, or conversations. The same seed
makes the same arrivals.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from overlap_spec.config.keys import write_private
from overlap_spec.errors import ConfigError

FIRST_ID = 5  # ids below are often special tokens
ROW_BITS = 48
OWN_ROWS = 1 << 32  # rows of requests that name none begin here
RESERVED = {"prompt", "text", "input_ids", "max_tokens", "max_new_tokens", "stream", "stream_options"}


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request. `at`: seconds from the start, or from the end of the request whose `id` is in `after`.

    `prompt`: a text or token ids; without it, `prompt_len` random ids. Prompts of the same `row` begin with the same
    ids, others share nothing. `body`: fields of the request's body. `tag`: requests with figures of their own.
    `ends_run`: when it is answered, the other requests of its client are cut off.
    """

    at: float
    output_len: int
    prompt: str | list[int] | None = None
    prompt_len: int = 0
    row: int | None = None
    id: str = ""
    after: str = ""
    tag: str = ""
    ends_run: bool = False
    body: dict[str, Any] = {}


def read_arrivals(path: str) -> list[Arrival]:
    """The arrivals of a file. Raises: ConfigError that names the line and the field."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError("arrivals", f"cannot read {path}: {error.strerror}") from None
    arrivals: list[Arrival] = []
    known: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            arrival = msgspec.json.decode(line, type=Arrival)
            _check(arrival, known)
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError("arrivals", f"{path} line {number}: {error}") from None
        arrivals.append(arrival)
        known.add(arrival.id)
    if not arrivals:
        raise ConfigError("arrivals", f"{path} has no requests")
    return arrivals


def write_arrivals(path: str, arrivals: Sequence[Arrival]) -> None:
    """Write a file that `read_arrivals` reads."""
    write_private(Path(path), b"".join(msgspec.json.encode(arrival) + b"\n" for arrival in arrivals))


def with_rows(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same; each has a row, so that its prompt does not depend on how requests are shared among processes."""
    return [
        msgspec.structs.replace(arrival, row=OWN_ROWS + index) if arrival.row is None else arrival
        for index, arrival in enumerate(arrivals)
    ]


def shared_out(arrivals: Sequence[Arrival], count: int) -> list[list[Arrival]]:
    """`count` parts of about equal size. What waits for another request is in the same part."""
    part_of: dict[str, int] = {}
    parts: list[list[Arrival]] = [[] for _ in range(count)]
    turn = 0
    for arrival in arrivals:
        if arrival.after:
            part = part_of[arrival.after]
        else:
            part, turn = turn, (turn + 1) % count
        parts[part].append(arrival)
        if arrival.id:
            part_of[arrival.id] = part
    return parts


def prompt_of(arrival: Arrival, vocab_size: int, seed: int) -> str | list[int]:
    """The arrival's prompt. Of the same row and seed, a shorter random prompt is the beginning of a longer one."""
    if arrival.prompt is not None:
        return arrival.prompt
    assert arrival.row is not None, "with_rows has given one"
    rng = random.Random((seed << ROW_BITS) + arrival.row)
    return rng.choices(range(FIRST_ID, vocab_size), k=arrival.prompt_len)


def check_body(body: dict[str, Any]) -> None:
    """Raises: ValueError for a field that is made of other fields of an arrival."""
    if reserved := RESERVED & body.keys():
        raise ValueError(f"body: {min(reserved)} is set by the load generator; give prompt, prompt_len or output_len")


def _check(arrival: Arrival, known: set[str]) -> None:
    """Raises: ValueError naming the field."""
    if not 0 <= arrival.at < float("inf"):
        raise ValueError(f"at: must be seconds from 0 on, got {arrival.at}")
    if arrival.output_len < 1:
        raise ValueError(f"output_len: must be at least 1, got {arrival.output_len}")
    if (arrival.prompt is None) == (arrival.prompt_len == 0) or arrival.prompt_len < 0:
        raise ValueError("prompt_len: give either prompt, or prompt_len of at least 1")
    if arrival.prompt is not None and not arrival.prompt:
        raise ValueError("prompt: is empty")
    if arrival.row is not None and arrival.row < 0:
        raise ValueError(f"row: must be at least 0, got {arrival.row}")
    check_body(arrival.body)
    if arrival.id and arrival.id in known:
        raise ValueError(f"id: {arrival.id!r} is the id of an earlier line")
    if arrival.after and arrival.after not in known:
        raise ValueError(f"after: {arrival.after!r} is the id of no earlier line")


STREAM_PROMPT = 128  # tokens of the prompt of a stream that a long prompt interrupts
BEFORE_LONG_S = 1.5  # that streams run before the long prompt arrives
LONG_ANSWER = 16
THINK_S = 0.5  # between two turns of a conversation
ALONE, STREAM, LONG = "alone", "stream", "long"  # tags


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution of token counts, cut off at both ends. `mean` and `sigma` are those of the logarithm."""

    mean: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: random.Random, count: int) -> list[int]:
        drawn = (rng.lognormvariate(self.mean, self.sigma) for _ in range(count))
        return [min(max(round(length), self.least), self.most) for length in drawn]


PROMPTS = Lengths(6.6, 1.0, 64, 7500)  # with the longest answer, in a context of 8,192
ANSWERS = Lengths(5.0, 0.7, 16, 600)


@dataclass(frozen=True)
class Poisson:
    """Requests at random times, `rate` a second on average; all at once if it is infinite."""

    rate: float
    prompts: Lengths = PROMPTS
    answers: Lengths = ANSWERS

    def arrivals(self, count: int, seed: int) -> list[Arrival]:
        """`count` requests. Their lengths depend on the seed alone, not on the rate."""
        rng = random.Random(seed)
        prompts, answers = self.prompts.draw(rng, count), self.answers.draw(rng, count)
        times = accumulate((rng.expovariate(1.0) / self.rate for _ in range(count - 1)), initial=0.0)
        rows = zip(times, prompts, answers, strict=True)
        return [Arrival(at=round(at, 6), prompt_len=prompt, output_len=answer) for at, prompt, answer in rows]

    def count_for(self, duration_s: float) -> int:
        """The mean number of requests in that time."""
        return max(1, math.ceil(self.rate * duration_s))


def long_prompt(length: int, num_streams: int, answer: int) -> list[Arrival]:
    """A prompt of `length` tokens alone; then streams, and another such prompt among them. Its answer ends the run."""
    alone = Arrival(id=ALONE, tag=ALONE, at=0.0, prompt_len=length, output_len=LONG_ANSWER)
    stream = Arrival(after=ALONE, tag=STREAM, at=0.0, prompt_len=STREAM_PROMPT, output_len=answer)
    late = msgspec.structs.replace(alone, id="", after=ALONE, tag=LONG, at=BEFORE_LONG_S, ends_run=True)
    return [alone, *[stream] * num_streams, late]


def conversations(num_streams: int, num_turns: int, first: int, more: int, answer: int) -> list[Arrival]:
    """Each turn's prompt is that of the turn before and `more` new tokens, sent `THINK_S` after that turn's end.

    The tags are `turn 1` and `later turns`.
    """
    return [
        Arrival(
            id=f"{stream}.{turn}",
            after=f"{stream}.{turn - 1}" if turn else "",
            tag="later turns" if turn else "turn 1",
            at=THINK_S if turn else 0.0,
            prompt_len=first + more * turn,
            output_len=answer,
            row=stream,
        )
        for turn in range(num_turns)
        for stream in range(num_streams)
    ]

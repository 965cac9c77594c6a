"""Arrivals that are made rather than read: Poisson with lognormal lengths, a long prompt among streams, conversations.

The same seed makes the same arrivals.
"""

import math
import random
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from overlap_spec.bench.traffic.arrivals import Arrival

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
        """`count` lengths."""
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

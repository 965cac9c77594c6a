"""The oracle of sampled tokens, for one row in plain Python: no tensors, and no code of the sampler.

Order of processing: p = softmax(logits / T); top_k, top_p and min_p are each computed on p, without renormalising in
between; the token is argmax(logits / T + g) over what all of them keep. g is Gumbel noise keyed by (seed, position,
token id) through SplitMix64 (doi:10.1145/2660193.2660195).

Each filter keeps the most probable tokens down to some rank, so only the strictest of several has an effect on a row.
A test of a combination therefore needs rows in which each of its filters is the strictest in turn: `strictest` tells
which.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
OFF = {"top_k": -1, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True)
class Filters:
    """The values that switch a filter off are the defaults."""

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    def without(self, name: str) -> "Filters":
        """All but one."""
        return replace(self, **{name: OFF[name]})

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are on."""
        return tuple(name for name, off in OFF.items() if getattr(self, name) != off)


def subsets(filters: Filters, fewest: int) -> list[Filters]:
    """Every combination of at least so many of these filters."""
    return [
        Filters(**{name: getattr(filters, name) for name in chosen})
        for count in range(fewest, len(filters.names) + 1)
        for chosen in combinations(filters.names, count)
    ]


@dataclass(frozen=True)
class Penalties:
    """The default values change nothing."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def applied(self, logits: Sequence[float], prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Logits of the token after these."""
        new = list(logits)
        for token in {*prompt, *output}:
            new[token] = new[token] / self.repetition if new[token] > 0 else new[token] * self.repetition
        for token, count in Counter(output).items():
            new[token] = new[token] - count * self.frequency - self.presence
        return new


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    """Probabilities at a temperature above 0."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def kept(p: Sequence[float], filters: Filters) -> set[int]:
    """Tokens that survive. Of equally probable ones the lower id comes first."""
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    alive = set(order)
    if filters.top_k != OFF["top_k"]:
        alive &= set(order[: filters.top_k])
    if filters.top_p != OFF["top_p"]:
        before = accumulate((p[token] for token in order), initial=0.0)
        alive &= {token for token, mass in zip(order, before, strict=False) if mass < filters.top_p}
    if filters.min_p != OFF["min_p"]:
        alive &= {token for token in order if p[token] >= filters.min_p * p[order[0]]}
    return alive


def strictest(p: Sequence[float], filters: Filters) -> set[str]:
    """Filters without which other tokens are kept: one, or none where two agree."""
    return {name for name in filters.names if kept(p, filters.without(name)) != kept(p, filters)}


def filtered(logits: Sequence[float], temperature: float, filters: Filters) -> list[float]:
    """The distribution that a token is drawn from."""
    p = softmax(logits, temperature)
    alive = kept(p, filters)
    total = math.fsum(p[token] for token in alive)
    return [p[token] / total if token in alive else 0.0 for token in range(len(p))]


def must_draw(
    before: Sequence[int], output_from: int, budget: int, is_open: bool, opening: Sequence[int], closing: Sequence[int]
) -> int:
    """The token that the row after these tokens has to draw, -1 where any may be: a budget of reasoning is spent."""
    output = list(before[output_from:])
    if output[: len(opening)] == list(opening):
        output = output[len(opening) :]
    elif not is_open:
        return -1
    thought, rest = output[:budget], output[budget:]
    ends = any(thought[i : i + len(closing)] == list(closing) for i in range(len(thought)))
    if len(thought) < budget or ends or len(rest) >= len(closing):
        return -1
    return closing[len(rest)]


def drawn(logits: Sequence[float], temperature: float, filters: Filters, seed: int, position: int) -> int:
    """The token at an absolute position."""
    alive = kept(softmax(logits, temperature), filters)
    return max(alive, key=lambda token: logits[token] / temperature + gumbel(seed, position, token))


def gumbel(seed: int, position: int, token: int) -> float:
    """Noise by its key."""
    row = mix64(mix64(seed + GAMMA) ^ (position * GAMMA & MASK))
    bits = mix64(row ^ mix64(token * GAMMA + 1))
    return -math.log(-math.log(((bits >> 11) + 0.5) * 2.0**-53))


def mix64(x: int) -> int:
    """SplitMix64's output function with Python's unbounded integers."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)

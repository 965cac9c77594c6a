"""Log-probs as a Python user reads them."""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from overlap_spec.messages import LogProbs


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that might be at a position. `token`: its bytes, of which some characters take several tokens."""

    token_id: int
    log_prob: float
    token: bytes


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """A token with the log of its probability, given the tokens before it, by the model alone.

    `log_prob`: None for the first prompt token. `top`: the most probable tokens, best first. `listed`: those that were
    asked for by id.
    """

    token_id: int
    log_prob: float | None
    token: bytes
    top: list[Candidate]
    listed: list[Candidate]

    @property
    def text(self) -> str:
        """What is no whole character becomes U+FFFD."""
        return self.token.decode(errors="replace")


def read_log_probs(packed: LogProbs | None) -> list[TokenLogProb]:
    """One for each token; none if there are none."""
    if packed is None:
        return []
    return [_entry(pairs, packed) for pairs in _records(packed)]


def _records(packed: LogProbs) -> Iterator[list[tuple[float, int]]]:
    numbers = array("d", packed.records)
    pairs = zip(numbers[::2], map(int, numbers[1::2]), strict=True)
    size = 1 + packed.top + packed.listed
    while record := list(islice(pairs, size)):
        yield record


def _entry(pairs: list[tuple[float, int]], packed: LogProbs) -> TokenLogProb:
    names = packed.names
    candidates = [Candidate(token, log_prob, names[token]) if token >= 0 else None for log_prob, token in pairs[1:]]
    top, listed = candidates[: packed.top], candidates[packed.top :]
    log_prob, token = pairs[0]
    return TokenLogProb(
        token,
        None if math.isnan(log_prob) else log_prob,
        names[token],
        [each for each in top if each is not None],
        [each for each in listed if each is not None],
    )

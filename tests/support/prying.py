"""One client's guesses at what another has sent, and what the answers tell of that.

The victim is alice, who sends secrets; bob guesses. Every guess is sent once: a second one would find the first.
"""

import random
import re
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from support.command_line import Service
from support.rank_test import rank_p_value
from support.tiny.models import VOCAB, tiny_target, write_checkpoint
from support.tiny.tokenizer import write_tokenizer

KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}
WORDS = 6  # ids from here on are letters
CACHED = re.compile(r'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d+)')


def key_flags(directory: Path) -> list[str]:
    """Of a server with the two clients."""
    path = directory / "keys"
    path.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    path.chmod(0o600)
    return ["--api-key-file", str(path)]


def write_slow_model(directory: Path, context: int, layers: int = 2) -> Path:
    """A model whose prefill of 2,000 tokens takes much longer on a CPU than one step; with one layer, that of 8,000."""
    config: dict[str, Any] = {"layers": layers, "hidden": 64, "max_position_embeddings": context}
    write_checkpoint(directory, tiny_target(seed=1, **config))
    return write_tokenizer(directory)


def cached_counts(text: str) -> set[int]:
    """What an answer tells of cached tokens, in any endpoint's form, streamed or not; each count once."""
    return {int(count) for count in CACHED.findall(text)}


class Prober:
    """Sends as alice and as bob."""

    def __init__(self, service: Service, **salts: str) -> None:
        self._salts = salts
        self._http = httpx.Client(base_url=service.url, timeout=120)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._http.close()

    def send(self, name: str, path: str, body: dict[str, Any], status: int = 200) -> str:
        """The text of the answer."""
        salt = {"cache_salt": self._salts[name]} if name in self._salts else {}
        headers = {"authorization": f"Bearer {KEYS[name]}"}
        reply = self._http.post(path, json={**body, **salt}, headers=headers)
        assert reply.status_code == status, reply.text
        return reply.text

    def seconds(self, name: str, ids: list[int], new_tokens: int = 1) -> float:
        """What an answer of so many tokens takes; the same ids have the same answer, others quite another."""
        own = {"temperature": 1, "sampling_seed": hash(tuple(ids)) % 2**31}
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, **own}
        started = time.perf_counter()
        self.send(name, "/generate", {"input_ids": ids, "sampling_params": sampling})
        return time.perf_counter() - started


class Times(NamedTuple):
    """Seconds of bob's guesses, by what alice has sent just before each."""

    right: list[float]
    wrong: list[float]

    @property
    def p_value(self) -> float:
        return rank_p_value(self.right, self.wrong)


class Guesses(NamedTuple):
    """What bob tries: as many prompts, half of them right, of so many tokens that are new.

    Each begins with `context`, which both send all the time, so what is cached of it tells nothing.
    """

    probes: int
    length: int
    context: int = 0
    new_tokens: int = 1


def guess_times(prober: Prober, guesses: Guesses, seed: int = 0) -> Times:
    """In random order. Alice's text is as long, and sent before each, right or wrong."""
    rng = random.Random(seed)
    is_right = [True, False] * (guesses.probes // 2)
    rng.shuffle(is_right)
    context = _random_ids(rng, guesses.context)
    times = Times([], [])
    for right in [True, False, *is_right]:
        secret, other = (context + _random_ids(rng, guesses.length) for _ in range(2))
        prober.seconds("alice", secret, guesses.new_tokens)
        taken = prober.seconds("bob", secret if right else other, guesses.new_tokens)
        (times.right if right else times.wrong).append(taken)
    return Times(times.right[1:], times.wrong[1:])  # the first ones find a cold server


def _random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(WORDS, VOCAB) for _ in range(count)]

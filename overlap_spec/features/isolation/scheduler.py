"""Counts what isolation costs: prompt tokens that another client had sent before, which sharing would have found.

A prompt is known by the digests of its first blocks, each of which covers all tokens up to its end. As many are
kept as the KV pages have room for, the newest; of each, which clients have sent it.

The count is for the operator alone: who guesses what another has sent would see it grow.
"""

import hashlib
from collections import OrderedDict

from msgspec.structs import replace

from overlap_spec.messages import TOKEN_BYTES, Admit, Stats
from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.hooks import SchedulerHook
from overlap_spec.scheduler.requests import Request

BLOCK, MOST_BLOCKS = 64, 128  # tokens; of a prompt: they take 0.15 ms


def attach(parts: Parts) -> SchedulerHook | None:
    """Where clients are isolated."""
    return UnsharedTokens(parts.limits.pool_tokens) if parts.settings.link.isolation.names else None


class UnsharedTokens(SchedulerHook):
    """The count of this module's docstring. `capacity`: tokens whose pages are kept, about."""

    def __init__(self, capacity: int) -> None:
        self.total = 0
        self._most = max(1, capacity // BLOCK)
        self._senders: OrderedDict[bytes, set[str]] = OrderedDict()  # by digest; the newest last

    def admitted(self, request: Request) -> bool:
        """A client that gives a salt of its own wants to share nothing."""
        admit = request.admit
        if admit.resumed is None and admit.salt.endswith("\0"):
            self._count(admit)
        return False

    def report(self, stats: Stats) -> Stats:
        return replace(stats, unshared_tokens_total=self.total)

    def _count(self, admit: Admit) -> None:
        digest, size, is_known = b"", BLOCK * TOKEN_BYTES, True
        for end in range(size, min(len(admit.prompt), MOST_BLOCKS * size) + 1, size):
            digest = hashlib.blake2b(digest + admit.prompt[end - size : end], digest_size=16).digest()
            senders = self._senders.setdefault(digest, set())
            is_known = is_known and bool(senders)
            if is_known and admit.salt not in senders and end > admit.public_len * TOKEN_BYTES:
                self.total += BLOCK
            senders.add(admit.salt)
            self._senders.move_to_end(digest)
        while len(self._senders) > self._most:
            self._senders.popitem(last=False)

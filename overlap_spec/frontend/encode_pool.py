"""Encodes texts: a short one never waits behind long ones, clients take turns, and what waits is bounded.

    up to LONG characters      at once, in the event loop
    up to VERY_LONG            one thread pool
    longer                     another thread pool, in pieces: each waits for its turn, so long prompts share it
    longer, and cannot be cut  a process: one word of 600,000 characters, say

Work that has not begun is dropped when its caller is cancelled.

In a thread a text that cannot be cut would keep others waiting that are cut (`codec.py`), and Python's lock while its
ids become Python's numbers. In a process it leaves both alone, ends with its request, and clients take turns.
"""

import asyncio
import os
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from overlap_spec.client.link import id_array, pack_ids
from overlap_spec.errors import Overloaded, RequestError
from overlap_spec.frontend.codec import load_tokenizer
from overlap_spec.frontend.overload import ByteBudget
from overlap_spec.runtime.isolated import Isolated, TooLarge, TooLong, WorkFailed
from overlap_spec.runtime.turns import Turns

T = TypeVar("T")

LONG = 2_000  # characters or ids: about a millisecond of work
VERY_LONG = 32_768  # characters: some 20 ms of work
MOST_THREADS = 4  # of each pool


class _Pool:
    """Threads, and whose turn it is to use one."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.num_threads = num_threads
        self.threads = ThreadPoolExecutor(num_threads, name)
        self.turns = Turns[str](num_threads)


class EncodeThreads:
    """The pools. `budget` bounds the characters of texts that are held for them, by owner and in all."""

    def __init__(self, budget: ByteBudget[str]) -> None:
        self._budget = budget
        num_cores = len(os.sched_getaffinity(0))
        num_threads = [min(MOST_THREADS, max(1, num_cores // share)) for share in (2, 4)]
        self._long = _Pool(num_threads[0], "encode")
        self._very_long = _Pool(num_threads[1], "encode-long")

    @contextmanager
    def holding(self, owner: str, num_chars: int) -> Iterator[None]:
        """Hold a text while it waits and is worked on. Raises: Overloaded."""
        if not self._budget.take(owner, num_chars):
            waiting, yours = self._budget.total, self._budget.of(owner)
            text = f"{waiting} characters of prompts wait to be encoded, {yours} of yours"
            bounds = f"at most {self._budget.in_all} may, {self._budget.per_owner} of one client"
            raise Overloaded(f"{text}: no room for {num_chars} more now; {bounds}")
        try:
            yield
        finally:
            self._budget.give(owner, num_chars)

    def num_threads(self, num_chars: int) -> int:
        """How many threads there are for a text of so many characters."""
        return self._pool(num_chars).num_threads

    async def run(self, owner: str, num_chars: int, work: Callable[[], T]) -> T:
        """Do work on a text of so many characters. Owners take turns.

        Cancellation: work that has not begun is dropped; else it ends in its thread and its result is dropped.
        """
        pool = self._pool(num_chars)
        async with pool.turns.turn(owner):
            return await asyncio.get_running_loop().run_in_executor(pool.threads, work)

    def close(self) -> None:
        """Drop what has not begun; what has begun ends."""
        for pool in (self._long, self._very_long):
            pool.threads.shutdown(wait=False, cancel_futures=True)

    def _pool(self, num_chars: int) -> _Pool:
        return self._very_long if num_chars > VERY_LONG else self._long


ENCODER = f"{__name__}:encoder"
MANY_BYTES = 131_072  # of a text that cannot be cut: it is encoded in a process
MOST_BYTES = 786_432  # the same: it is refused
MOST_PER_TOKEN = 6  # the same, of each token of the context, if that is more
MEMORY = 160  # bytes of memory that each byte of a text may take
BASE_S, S_PER_BYTE = 2.0, 1e-5  # of CPU time: some ten times what it takes


class UncutTexts:
    """Encodes such texts with the tokenizer of a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._turns = Turns[str](1)
        self._isolated: Isolated | None = None

    async def encode(self, text: bytes, field: str, owner: str, max_len: int) -> "array[int]":
        """Token ids of a text in UTF-8, without special tokens. `owner`: whose turn it takes.

        Raises: RequestError naming `field`. Cancellation: the process is killed.
        """
        most = max(MOST_BYTES, MOST_PER_TOKEN * max_len)
        if len(text) > most:
            where = "between words, or after a line"
            why = f"{len(text)} bytes of the text have no place where it can be cut ({where}), at most {most} are taken"
            raise RequestError(field, f"{field}: {why}")
        if self._isolated is None:
            self._isolated = Isolated(ENCODER, self._directory, most_bytes=MEMORY * most)
        try:
            async with self._turns.turn(owner):
                return id_array(await self._isolated.run(text, BASE_S + S_PER_BYTE * len(text)))
        except (TooLong, TooLarge, WorkFailed) as error:
            raise RequestError(field, f"{field}: {len(text)} bytes could not be encoded as a whole: {error}") from error

    def close(self) -> None:
        """End the process."""
        if self._isolated is not None:
            self._isolated.close()


def encoder(directory: str) -> Callable[[bytes], bytes]:
    """Load a tokenizer. The function takes a text in UTF-8 and returns packed ids."""
    tokenizer = load_tokenizer(Path(directory))

    def encode(text: bytes) -> bytes:
        (encoding,) = tokenizer.encode_batch_fast([text.decode()], add_special_tokens=False)
        return pack_ids(encoding.ids)

    return encode

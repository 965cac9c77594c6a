"""Encodes long texts that cannot be cut, in a process: one word of 600,000 characters, say.

In a thread such a text would keep others waiting that are cut (`pieces.py`), and Python's lock while its ids become
Python's numbers. Here it leaves both alone, ends with its request, and clients take turns.
"""

from array import array
from collections.abc import Callable
from pathlib import Path

from overlap_spec.client.link import id_array, pack_ids
from overlap_spec.errors import RequestError
from overlap_spec.frontend.codec import load_tokenizer
from overlap_spec.runtime.isolated import Isolated, TooLarge, TooLong, WorkFailed
from overlap_spec.runtime.turns import Turns

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

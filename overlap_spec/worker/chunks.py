"""The host's part of a prefill step: chunks flattened into rows, in one run of integers.

A step has rows (prompt tokens) and chunks (one of each request). It may be laid out for more of both than it has,
so that one captured graph serves many steps: the rows left over belong to the last chunk, and a chunk left over to the
dummy slot.
"""

import struct
from array import array
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from torch import Tensor

from overlap_spec.messages import TOKEN_BYTES, ChunkWork
from overlap_spec.speculative.rows import ChunkPlace
from overlap_spec.worker.devices import Device

Ints = npt.NDArray[np.int64]


class Packer:
    """One step's integers in one buffer, so that a step costs one host-to-device copy.

    Collects runs of integers and returns them as views of one device tensor.
    """

    def __init__(self) -> None:
        self._values = array("q")
        self._bounds: list[tuple[int, int]] = []

    def add(self, values: "Iterable[int] | Ints | bytes") -> int:
        """Append a run, which may be packed already; returns its index.

        Every run starts at a multiple of 16 bytes, so that a kernel never meets a pointer less aligned than before:
        it would be compiled anew.
        """
        start = len(self._values)
        if isinstance(values, np.ndarray):
            values = values.tobytes()
        self._values.frombytes(values if isinstance(values, bytes) else pack_ints(values))
        self._bounds.append((start, len(self._values)))
        if len(self._values) % 2:
            self._values.append(0)
        return len(self._bounds) - 1

    def upload(self, device: Device) -> list[Tensor]:
        """The runs, in order, on the device. Shapes: each [n] i64. Sync: never."""
        # A trailing zero keeps the buffer non-empty, which torch.frombuffer insists on.
        self._values.append(0)
        packed = device.upload(self._values)
        return [packed[start:stop] for start, stop in self._bounds]


def pack_ints(values: Iterable[int]) -> bytes:
    """64-bit integers in the machine's order. Several times as fast as to extend an array."""
    items = tuple(values)
    return struct.pack(f"={len(items)}q", *items)


@dataclass(frozen=True)
class PromptShape:
    """What a prefill step is laid out for. `max_rows` bounds the rows of one request."""

    rows: int
    chunks: int
    max_rows: int
    places: tuple[ChunkPlace, ...] = ()  # of all chunks, if it is exactly for them
    reads_last: bool = False  # what the last layer gives is read at each chunk's last row only

    @property
    def sizes(self) -> tuple[int, ...]:
        """Integers of each field, in order (`Chunks.laid_out`, `PromptInputs`)."""
        return (*[self.rows] * 4, *[self.chunks] * 5, self.chunks + 1)


class Chunks:
    """The prompt chunks of one plan, in plan order. A chunk without a next token completes its prompt."""

    def __init__(self, work: Sequence[ChunkWork], fresh: Container[int] = ()) -> None:
        """`fresh`: slots that a request takes."""
        self._work = work
        self._fresh = fresh
        self._tokens = np.frombuffer(b"".join([w.tokens for w in work]), np.int32)
        self._sizes = [len(w.tokens) // TOKEN_BYTES for w in work]
        self._row_starts = [0, *accumulate(self._sizes)]  # and the end
        self._starts = [w.start for w in work]
        self._num_rows = self._row_starts[-1]

    @property
    def shape(self) -> PromptShape:
        places = tuple(map(ChunkPlace, self._starts, self._sizes))
        return PromptShape(self._num_rows, len(self._work), max(self._sizes), places, not self.rows_out())

    def completed(self) -> list[int]:
        """The slots of prompts that this step completes, in plan order."""
        return [work.slot for work in self._work if work.next_token < 0]

    def counts_out(self) -> list[int]:
        """How many rows of each chunk leave the device; empty if none does."""
        counts = [max(work.rows_out[1] - work.rows_out[0], 0) for work in self._work]
        return counts if any(counts) else []

    def rows_out(self) -> tuple[list[int], ...]:
        """Rows that leave the device, the prompt token after each, and the slot of each; () without any."""
        if not any(work.rows_out[1] for work in self._work):
            return ()
        rows: list[int] = []
        tokens: list[int] = []
        slots: list[int] = []
        next_tokens = self._next_tokens()
        for work, row_start in zip(self._work, self._row_starts, strict=False):
            if not work.rows_out[1]:
                continue
            first, end = (row_start + position - work.start for position in work.rows_out)
            rows += range(first, end)
            tokens += map(int, next_tokens[first:end])
            slots += [work.slot] * (end - first)
        return rows, tokens, slots

    def laid_out(self, shape: PromptShape, dummy: int) -> Ints:
        """Every field, each starting at a multiple of 16 bytes (see `Packer.add`).

        tokens; next tokens (-1: the one drawn for the row's chunk); positions; owners, the row's chunk
        slots; the slot to start, `dummy` where the prompt goes on; last row; prompt length, 0 where it goes on
        1 where a request takes its slot
        first rows, and the end
        """
        num_rows, spare_chunks = self._num_rows, shape.chunks - len(self._work)
        assert shape.rows == num_rows or spare_chunks > 0, "rows that are left over need a chunk that is"
        values = np.zeros(sum(size + size % 2 for size in shape.sizes), np.int64)
        tokens, next_tokens, positions, owners, *_ = fields_of(values, shape)
        tokens[:num_rows] = self._tokens
        next_tokens[:num_rows] = self._next_tokens()
        positions[:num_rows] = self._positions()
        if len(self._work) > 1:
            owners[:num_rows] = np.repeat(np.arange(len(self._work)), self._sizes)
        if shape.rows > num_rows:
            # A captured step may be empty and have more rows than a request has positions.
            positions[num_rows:] = np.minimum(np.arange(shape.rows - num_rows), shape.max_rows - 1)
            owners[num_rows:] = shape.chunks - 1
        of_chunks = self._of_chunks(spare_chunks, dummy, shape.rows)
        values[len(values) - len(of_chunks) :] = of_chunks
        return values

    def _of_chunks(self, spare: int, dummy: int, num_rows: int) -> list[int]:
        """The fields from the slots on. They are short: lists are faster than arrays."""
        work, ends, none = self._work, self._row_starts[1:], [0] * spare
        sizes = zip(work, self._sizes, strict=True)
        fields = [
            [w.slot for w in work] + [dummy] * spare,
            [w.slot if w.next_token < 0 else dummy for w in work] + [dummy] * spare,
            [end - 1 for end in ends] + none,
            [w.start + size if w.next_token < 0 else 0 for w, size in sizes] + none,
            [int(w.slot in self._fresh) for w in work] + none,
            self._row_starts[:-1] + [self._num_rows] * spare + [num_rows],
        ]
        return [value for field in fields for value in (field + [0] if len(field) % 2 else field)]

    def _next_tokens(self) -> Ints:
        """The token after every row; -1 where it is yet to be drawn."""
        tokens = np.empty(self._num_rows, np.int64)
        tokens[:-1] = self._tokens[1:]
        for work, end in zip(self._work, self._row_starts[1:], strict=True):
            tokens[end - 1] = work.next_token
        return tokens

    def _positions(self) -> Ints:
        """Every row's absolute position."""
        ahead = [start - row for start, row in zip(self._starts, self._row_starts, strict=False)]
        return np.arange(self._num_rows) + (np.repeat(ahead, self._sizes) if any(ahead) else 0)


def fields_of(values: Ints, shape: PromptShape) -> list[Ints]:
    """Views of the fields of a step's integers, in order."""
    starts = accumulate((size + size % 2 for size in shape.sizes), initial=0)
    return [values[start : start + size] for start, size in zip(starts, shape.sizes, strict=False)]

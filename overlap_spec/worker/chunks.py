"""The host's part of a prefill step: chunks flattened into rows, in one run of integers.

A step has rows (prompt tokens) and chunks (one of each request). It may be laid out for more of both than it has,
so that one captured graph serves many steps: the rows left over belong to the last chunk, and a chunk left over to the
dummy slot.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from overlap_spec.messages import SlotWork
from overlap_spec.spec.chunk_runs import ChunkPlace
from overlap_spec.worker.devices import Device


class Packer:
    """One step's integers in one buffer, so that a step costs one host-to-device copy.

    Collects runs of integers and returns them as views of one device tensor.
    """

    def __init__(self) -> None:
        self._values = array("q")
        self._bounds: list[tuple[int, int]] = []

    def add(self, values: Iterable[int]) -> int:
        """Append a run; returns its index.

        Every run starts at a multiple of 16 bytes, so that a kernel never meets a pointer less aligned than before:
        it would be compiled anew.
        """
        start = len(self._values)
        self._values.extend(values)
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

    def __init__(self, work: list[SlotWork]) -> None:
        self._work = work
        self._tokens = [_int32(w.prompt_chunk) for w in work]
        self._row_starts = [0, *accumulate(len(tokens) for tokens in self._tokens)]

    @property
    def shape(self) -> PromptShape:
        """Exactly what there is."""
        places = tuple(
            ChunkPlace(work.start, len(tokens)) for work, tokens in zip(self._work, self._tokens, strict=True)
        )
        return PromptShape(
            self._row_starts[-1], len(self._work), max(map(len, self._tokens)), places, not self.scored()
        )

    def completed_work(self) -> list[SlotWork]:
        """The work of prompts that this step completes, in plan order."""
        return [work for work in self._work if work.next_token < 0]

    def scored(self) -> tuple[list[int], ...]:
        """Rows after which the prompt token's log-prob is wanted, that token, and the slot, of each; () without any."""
        if not any(work.scored[1] for work in self._work):
            return ()
        rows: list[int] = []
        tokens: list[int] = []
        slots: list[int] = []
        next_tokens = self._next_tokens()
        for work, row_start in zip(self._work, self._row_starts, strict=False):
            if not work.scored[1]:
                continue
            first, end = (row_start + position - work.start for position in work.scored)
            rows += range(first, end)
            tokens += next_tokens[first:end]
            slots += [work.slot] * (end - first)
        return rows, tokens, slots

    def laid_out(self, shape: PromptShape, dummy: int) -> "array[int]":
        """Every field, each starting at a multiple of 16 bytes (see `Packer.add`).

        tokens; next tokens (-1: the one drawn for the row's chunk); positions; owners, the row's chunk
        slots; the slot to start, `dummy` where the prompt goes on; last row; prompt length, 0 where it goes on
        1 where a request takes its slot
        first rows, and the end
        """
        num_rows, num_slots_used = self._row_starts[-1], len(self._work)
        spare_rows, spare_slots = shape.rows - num_rows, shape.chunks - num_slots_used
        assert spare_rows == 0 or spare_slots > 0, "rows that are left over need a chunk that is"
        fields = (
            [token for tokens in self._tokens for token in tokens] + [0] * spare_rows,
            self._next_tokens() + [0] * spare_rows,
            self._positions() + list(range(spare_rows)),
            self._owners() + [shape.chunks - 1] * spare_rows,
            [work.slot for work in self._work] + [dummy] * spare_slots,
            [work.slot if work.next_token < 0 else dummy for work in self._work] + [dummy] * spare_slots,
            [end - 1 for end in self._row_starts[1:]] + [0] * spare_slots,
            self._lengths() + [0] * spare_slots,
            [int(work.reset is not None) for work in self._work] + [0] * spare_slots,
            (self._row_starts + [num_rows] * spare_slots)[: shape.chunks] + [shape.rows],
        )
        return _even(fields)

    def _next_tokens(self) -> list[int]:
        """The token after every row; -1 where it is yet to be drawn."""
        return [
            token
            for work, tokens in zip(self._work, self._tokens, strict=True)
            for token in (*tokens[1:], work.next_token)
        ]

    def _positions(self) -> list[int]:
        """Every row's absolute position."""
        starts = zip(self._work, self._tokens, strict=True)
        return [position for work, tokens in starts for position in range(work.start, work.start + len(tokens))]

    def _owners(self) -> list[int]:
        return [chunk for chunk, tokens in enumerate(self._tokens) for _ in tokens]

    def _lengths(self) -> list[int]:
        rows = zip(self._work, self._tokens, strict=True)
        return [work.start + len(tokens) if work.next_token < 0 else 0 for work, tokens in rows]


def _even(fields: Iterable[list[int]]) -> "array[int]":
    values = array("q")
    for field in fields:
        values.extend(field)
        if len(field) % 2:
            values.append(0)
    return values


def _int32(packed: bytes) -> "array[int]":
    values = array("i")
    values.frombytes(packed)
    return values

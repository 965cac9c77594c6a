"""One forward for a decode step and the prefill step after it: windows and chunks are rows of the same products.

A decode step reads all weights for few rows, a chunk multiplies many rows by them. Together they take little longer
than the chunk alone. All else stays apart: each part attends as in a step of its own, and what follows the layers is
what follows them there.
"""

from typing import Protocol

import torch
from torch import Tensor

from overlap_spec.speculative.rows import joined
from overlap_spec.worker.chunks import PromptShape
from overlap_spec.worker.decode import DecodeStep
from overlap_spec.worker.prefill import Prefilled, PrefillStep
from overlap_spec.worker.windows import Forwarded


class Joiner(Protocol):
    """Runs the layers of joined steps, launching each operation or replaying graphs. Sync: never."""

    def shape_for(self, num_slots: int, width: int, exact: PromptShape) -> PromptShape | None:
        """What to lay the chunks out for. None: such steps run one after the other."""
        ...

    def forward(self, slots: Tensor, width: int, packed: Tensor, shape: PromptShape) -> tuple[Forwarded, Prefilled]:
        """Run the target's layers on windows and chunks. The first len(slots) rows are the decode step's batch.

        Shapes: slots [B] i64; packed: see `Chunks.laid_out`.
        """
        ...


class JoinedStep:
    """The layers of both steps, operation by operation."""

    def __init__(self, decode: DecodeStep, prefill: PrefillStep) -> None:
        self.decode = decode
        self.prefill = prefill

    def shape_for(self, num_slots: int, width: int, exact: PromptShape) -> PromptShape:
        """Nothing is padded."""
        return exact

    def forward(self, slots: Tensor, width: int, packed: Tensor, shape: PromptShape) -> tuple[Forwarded, Prefilled]:
        windows, chunks = self.decode.read(slots, width), self.prefill.read(packed, shape)
        tokens = torch.cat((windows.tokens, chunks.inputs.tokens))
        output = self.decode.target.forward(tokens, joined(windows.rows, chunks.rows))
        of_windows, of_chunks = output.split(len(windows.tokens))
        return self.decode.forwarded(windows, of_windows), self.prefill.prefilled(chunks, of_chunks)

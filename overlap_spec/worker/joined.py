"""One forward for a decode step and the prefill step after it: windows and chunks are rows of the same products.

A decode step reads all weights for few rows, a chunk multiplies many rows by them. Together they take little longer
than the chunk alone. All else stays apart: each part attends as in a step of its own, and what follows the layers is
what follows them there.
"""

import torch
from torch import Tensor

from overlap_spec.spec.rows import joined
from overlap_spec.worker.chunks import PromptShape
from overlap_spec.worker.decode import DecodeStep
from overlap_spec.worker.prefill import Prefilled, PrefillStep
from overlap_spec.worker.windows import Forwarded


class JoinedStep:
    """The layers of both steps, operation by operation."""

    def __init__(self, decode: DecodeStep, prefill: PrefillStep) -> None:
        self._decode = decode
        self._prefill = prefill

    def forward(self, slots: Tensor, width: int, packed: Tensor, shape: PromptShape) -> tuple[Forwarded, Prefilled]:
        """Run them on windows and chunks. Sync: never on CUDA.

        Shapes: slots [B] i64; packed: see `Chunks.laid_out`.
        """
        windows, chunks = self._decode.read(slots, width), self._prefill.read(packed, shape)
        tokens = torch.cat((windows.tokens, chunks.inputs.tokens))
        output = self._decode.target.forward(tokens, joined(windows.rows, chunks.rows))
        of_windows, of_chunks = output.split(len(windows.tokens))
        return self._decode.forwarded(windows, of_windows), self._prefill.prefilled(chunks, of_chunks)

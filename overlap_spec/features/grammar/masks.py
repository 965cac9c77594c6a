"""The masks of grammars on the device: which tokens may follow each column of each slot's window.

The host writes those of a step before its tokens are drawn (`step.py`). They are masks of the target's rows;
guesses are drawn without, and what a grammar does not allow is never drawn after them.
"""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import mask_logits
from torch import Tensor

from overlap_spec.messages import SamplingParams
from overlap_spec.sampling.context import DrawContext


@dataclass(frozen=True)
class TokenMasks:
    """A row of bits for each slot and column of a window, at fixed addresses: steps are captured.

    The bits are on the host. A GPU reads pinned memory in place, so that a step's masks need no copy; they may change
    once the tokens of the last step that reads them have come.
    """

    name = "masks"
    target_only = True

    bits: Tensor  # [S, W, n] i32, on the host: bit t of a row allows token t
    active: Tensor  # [S] i32: 0 where the slot's request has no grammar

    @staticmethod
    def allocate(num_rows: int, width: int, num_words: int, device: torch.device) -> "TokenMasks":
        """No slot has a grammar, and every mask allows everything."""
        shape, is_cuda = (num_rows, width, num_words), device.type == "cuda"
        bits = torch.full(shape, -1, dtype=torch.int32, pin_memory=is_cuda)
        return TokenMasks(bits, torch.zeros(num_rows, dtype=torch.int32, device=device))

    @property
    def rows(self) -> Tensor:
        """The masks of all slots' columns, one after another. Shapes: [S * W, n] i32."""
        return self.bits.view(-1, self.bits.shape[2])

    def asked(self, sampling: SamplingParams) -> bool:
        return sampling.grammar is not None

    def activate(self, slots: Tensor) -> None:
        """These slots have requests with a grammar now. Sync: never. Shapes: slots [G] i64."""
        self.active.index_fill_(0, slots, 1)

    def clear(self, slots: Tensor) -> None:
        """These slots have requests without a grammar now. Sync: never. Shapes: slots [G] i64."""
        self.active.index_fill_(0, slots, 0)

    def apply(self, logits: Tensor, context: DrawContext) -> Tensor:
        """Forbid in place what the slots' grammars do not allow. Sync: never. Shapes: logits [B, R, V]."""
        mask_logits(logits, self.bits, self.active, context.sampling.slots)
        return logits

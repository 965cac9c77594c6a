"""The two roles of speculation and what the worker hands them. Not here: any method.

One decode step calls verify, then extend, then propose; a prefill calls `prefill` for every chunk and `propose`
for the prompts that it completed. None of them asks the device a question (Sync: never).
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TargetOutput
from overlap_spec.spec.types import SlotBatch, Verdict, Window


@dataclass(frozen=True)
class Prompts:
    """The chunks of a prefill step, flattened."""

    tokens: Tensor  # [T] i64
    next_tokens: Tensor  # [T] i64: the token that follows each row; at a prompt's end the one just drawn
    last_rows: Tensor  # [F] i64: last row of each prompt that this step completes
    slots: Tensor  # [F] i64: their slots


class Proposer(Protocol):
    """Makes guesses; what it needs to remember it keeps in rows indexed by slot."""

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> None:
        """Absorb prompt chunks."""
        ...

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Learn what was committed. `batch` and `rows` are those of the verify forward."""
        ...

    def propose(self, batch: SlotBatch) -> Tensor:
        """Guess what follows the roots at `batch.lengths`. Shapes: -> [B, K] i64, -1 where it does not guess."""
        ...


class Verifier(Protocol):
    """Decides which guesses stand, without changing the target's distribution."""

    def verify(self, window: Window, logits: Tensor, batch: SlotBatch) -> Verdict:
        """Pure. Shapes: logits [B, W, V]."""
        ...


@dataclass(frozen=True)
class SpecMethod:
    """A method, loaded: who guesses and who judges."""

    proposer: Proposer
    verifier: Verifier

"""The two roles of speculation and what the worker hands them. Not here: any method.

One decode step calls verify, then extend, then propose; a prefill calls `prefill` for every chunk and `propose`
for the prompts that it completed; what they learnt goes to `propose` as it is. A step of width 1, which needs no
guesses, calls `defer` instead of the last two, and `catch_up` comes before the step that needs them again. None of them
asks the device a question (Sync: never).
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, Scores, TargetOutput
from overlap_spec.spec.types import Drawn, SlotBatch, Verdict, Window


@dataclass(frozen=True)
class Prompts:
    """The chunks of a prefill step, flattened."""

    tokens: Tensor  # [T] i64
    next_tokens: Tensor  # [T] i64: the token that follows each row; at a prompt's end the one just drawn
    last_rows: Tensor  # [F] i64: last row of each prompt that this step completes
    slots: Tensor  # [F] i64: their slots


class Proposer(Protocol):
    """Makes guesses; what it remembers from step to step it keeps in rows indexed by slot."""

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Tensor:
        """Absorb prompt chunks. Shapes: -> [F, n], learnt of the prompts that the step completes."""
        ...

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Tensor:
        """Learn what was committed. `batch` and `rows` are those of the verify forward. Shapes: -> [B, n]."""
        ...

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Keep what `extend` would have learnt of a window of one, for `catch_up`."""
        ...

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Absorb the last `counts` rows before `batch.lengths`, which were deferred. Shapes: counts [B] i64."""
        ...

    def propose(self, batch: SlotBatch, learnt: Tensor, num_guesses: int) -> Tensor:
        """Guess what follows the roots at `batch.lengths`. Shapes: learnt [B, n] -> [num_guesses, B] i64, -1: none."""
        ...


class Verifier(Protocol):
    """Decides which guesses stand, without changing the target's distribution."""

    def verify(self, window: Window, scores: Scores, batch: SlotBatch) -> Drawn:
        """Pure. Sync: never. Shapes: scores of B * W rows, row j of a slot follows window column j."""
        ...


@dataclass(frozen=True)
class SpecMethod:
    """A method, loaded: who guesses and who judges."""

    proposer: Proposer
    verifier: Verifier

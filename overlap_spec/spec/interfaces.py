"""The two roles of speculation and what the worker hands them.

One decode step calls verify, then extend, then propose; a prefill calls `prefill` for every chunk and `propose`
for the prompts that it completed; what they learnt goes to `propose` as it is. A step of width 1, which needs no
guesses, calls `defer` instead of the last two, and `catch_up` comes before the step that needs them again. None of them
asks the device a question (Sync: never).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetOutput
from overlap_spec.spec.types import Drawn, Guesses, SlotBatch, Verdict, Window


@dataclass(frozen=True)
class Prompts:
    """The chunks of a prefill step, flattened."""

    tokens: Tensor  # [T] i64
    next_tokens: Tensor  # [T] i64: the token that follows each row; at a prompt's end the one just drawn
    last_rows: Tensor  # [F] i64: last row of each prompt that this step completes
    slots: Tensor  # [F] i64: their slots
    seats: Tensor  # [B] i64: the slot of every chunk
    fresh: Tensor  # [B] i64: 1 where the chunk is its request's first in this slot


class Proposer(Protocol):
    """Makes guesses; what it remembers from step to step it keeps in rows indexed by slot."""

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Tensor:
        """Absorb prompt chunks. Shapes: -> [F, n], learnt of the prompts that the step completes."""
        ...

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Tensor:
        """Learn what was committed. Shapes: -> [B, n].

        `batch`, `rows` and `output` are those of the verify forward; of a tree, D rows for each slot at consecutive
        positions from its length: those of the path that stands, first.
        """
        ...

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Keep what `extend` would have learnt of a window of one, for `catch_up`."""
        ...

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Absorb the last `counts` rows before `batch.lengths`, which were deferred. Shapes: counts [B] i64."""
        ...

    def propose(self, batch: SlotBatch, learnt: Tensor, num_guesses: int) -> Guesses:
        """Guess what follows the roots at `batch.lengths`. Shapes: learnt [B, n]; K = num_guesses."""
        ...


class Verifier(Protocol):
    """Decides which guesses stand, without changing the target's distribution."""

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        """Pure. Sync: never. Shapes: logits of B * W rows, row j of a slot follows window column j."""
        ...


@runtime_checkable
class SelfDrafting(Protocol):
    """A proposer whose guesses cost next to nothing. It fills a whole window after every step, whatever its width.

    `extend` and `propose` are called after steps of width 1 too, `defer` and `catch_up` never.
    """

    def lookahead(self, batch: SlotBatch, verdict: Verdict, last: Tensor) -> Tensor:
        """What the whole windows of a step promised, and what the verdict says of it
        (`messages.StepResult.lookaheads`).

        Called before `extend`. Shapes: last [B] i64, the window columns where accepted runs end -> [B] i64.
        """
        ...

    def forget(self) -> None:
        """Let go of what requests that are gone have said: caches are flushed."""
        ...


@dataclass(frozen=True)
class Tree:
    """What a decode step needs to know where guesses are trees."""

    num_levels: int  # of guesses: the most that a step can accept
    move: Callable[[Tensor, Tensor], None]  # KV of the target, in all layers: from cache rows [B, D] to cache rows


@dataclass(frozen=True)
class SpecMethod:
    """A method, loaded: who guesses, who judges, and what is kept of a window that is a tree."""

    proposer: Proposer
    verifier: Verifier
    tree: Tree | None = None  # None: windows are chains, whose KV stands where it belongs

"""The shapes of speculation, and what comes before the rows that it draws for.

Legend, used in every comment of `speculative/`, `worker/`, `models/` and the kernels:

    B  slots in the step            V   target vocabulary       S  slots of the engine
    W  window width, root included  Vd  draft vocabulary        P  pages in a slot's page-table row
    K  guesses, W - 1               H   hidden size             T  rows of a forward, B * W in decode
    D  longest run that a step can commit: W of a chain, of a tree its levels and the root
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from overlap_spec_kernels import Candidates, Verdict
from torch import Tensor

from overlap_spec.sampling.context import DrawContext, History, Path, Sampling

__all__ = ["Drawn", "Guesses", "SlotBatch", "Verdict", "Window"]


@dataclass(frozen=True)
class Guesses:
    """What is proposed, best first, parents before children. Siblings are distinct tokens; a -1 has no children."""

    tokens: Tensor  # [K, B] i64; -1: none
    parents: Tensor | None = None  # [K, B] i64: window column of each guess's parent, 0 = root; None: a chain


@dataclass(frozen=True)
class Window:
    """What a step verifies. Column 0 is the root, the last committed token; the others are guesses.

    Its KV is at places length, length + 1, .. of the slot, by column. In a tree a position, which rotation and
    noise go by, is the length plus the column's distance from the root.
    """

    tokens: Tensor  # [B, W] i64; -1 where a slot has no guess, which equals no token
    positions: Tensor  # [B, W] i64
    parents: Tensor | None = None  # [B, W] i64, columns before their own, the root's 0; None: a chain
    num_levels: int | None = None  # of guesses, at most; None: W - 1


@dataclass(frozen=True)
class Drawn:
    """A verifier's decision: `accept_len` guesses stand, and the token after the last of them is committed."""

    tokens: Tensor  # [B, W] i64, the token after each column of the window, if the guesses up to it stand
    accept_len: Tensor | None = None  # [B] i64; None: while a guess is what was drawn


@dataclass(frozen=True)
class SlotBatch:
    """The slots of a step, in plan order."""

    slots: Tensor  # [B] i64
    lengths: Tensor  # [B] i64: tokens whose KV is written = absolute position of the root
    page_table: Tensor  # [B, P] i32
    sampling: Sampling
    shares: Tensor | None = None  # [S] i64, of `TargetModel.divide`
    places: Tensor | None = None  # [n, B] i64: lengths + 0..n - 1, where a kernel has written them

    @cached_property
    def history(self) -> History:
        """What is committed, roots included."""
        return History(self.sampling, self.page_table, self.lengths)


def window_context(window: Window, batch: SlotBatch, token_ids: Tensor) -> DrawContext:
    """Of the target's rows: one after every column. Shapes: token_ids [V] i64."""
    depth = window.tokens.shape[1] - 1 if window.num_levels is None else window.num_levels
    path = Path(window.tokens, window.parents, root=0, depth=depth)
    return DrawContext(batch.history, token_ids, window.positions, path=path, of_target=True)


def chain_context(batch: SlotBatch, guesses: Sequence[Tensor], target_ids: Tensor) -> DrawContext:
    """Of the next guess of each chain. Shapes: guesses so far [B] i64 each, target_ids [Vd] i64."""
    path, rows = Path(tuple(guesses), depth=len(guesses)), batch.lengths[:, None]
    return DrawContext(batch.history, target_ids, rows, len(guesses), path)


def level_context(
    batch: SlotBatch, grown: Candidates | None, nodes: Tensor, level: int, target_ids: Tensor
) -> DrawContext:
    """Of the children of the nodes of a tree's level, the root's being 0; `grown`: what was made so far.

    Shapes: nodes [B, R] i64, candidates; -1: the root. target_ids [Vd] i64.
    """
    tokens, parents = ((), None) if grown is None else (grown.tokens, grown.parents)
    path, rows = Path(tokens, parents, nodes, depth=level), batch.lengths[:, None].expand(nodes.shape)
    return DrawContext(batch.history, target_ids, rows, level, path)

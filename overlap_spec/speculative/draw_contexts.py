"""What comes before the rows that speculation draws for: of windows, of chains and trees on their way."""

from collections.abc import Sequence

from overlap_spec_kernels import Candidates
from torch import Tensor

from overlap_spec.sampling.context import DrawContext, Path
from overlap_spec.speculative.types import SlotBatch, Window


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

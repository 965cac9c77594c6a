"""The two roles of speculation, what the worker hands them, and the shapes of both.

One decode step calls verify, then extend, then propose. A prefill calls `prefill` for every chunk and `propose` for the
prompts that it completed. What `extend` and `prefill` have learnt goes to `propose` as it is. A step of width 1, which
needs no guesses, calls `defer` instead of `extend` and `propose`, and `catch_up` comes before the step that needs
guesses again. None of them asks the device a question (Sync: never).

Legend, used in every comment of `speculative/`, `worker/`, `models/` and the kernels:

    B  slots in the step            V   target vocabulary       S  slots of the engine
    W  window width, root included  Vd  draft vocabulary        P  pages in a slot's page-table row
    K  guesses, W - 1               H   hidden size             T  rows of a forward, B * W in decode
    D  longest run that a step can commit: W of a chain, of a tree its levels and the root
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

from overlap_spec_kernels import Candidates, Verdict as Verdict
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetOutput
from overlap_spec.sampling.context import GREEDY_WORK, DrawContext, History, Path, Sampling, SamplingWork


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


ABSORBED_ROWS = 16  # of a slot, that one `catch_up` absorbs: so many that its launches and weight reads hardly count


@dataclass(frozen=True)
class Prompts:
    """The chunks of a prefill step, flattened: B chunks of different requests, T rows (tokens) in all.

    Rows `rows.row_starts[b]` to `rows.row_starts[b + 1] - 1` are chunk b's, at consecutive positions. A prompt may come
    in several steps, and begin behind a cached prefix, whose tokens are not here. A captured step may have more chunks
    than there are requests, and more rows in its last chunk: those that are left over belong to the dummy slot, which
    is the last row of every table with `EngineShape.num_rows` rows. It may be written to, and nothing reads it.
    """

    tokens: Tensor  # [T] i64
    next_tokens: Tensor  # [T] i64: the token that follows each row; at a prompt's end the one just drawn
    last_rows: Tensor  # [B] i64: last row of each chunk
    slots: Tensor  # [B] i64: the slot whose prompt ends with the chunk, the dummy where the prompt goes on
    chunk_slots: Tensor  # [B] i64: the slot of every chunk
    fresh: Tensor  # [B] i64: 1 where the chunk is its request's first in this slot: forget what the slot held before
    proposes: bool = True  # whether windows are proposed; else `prefill` leaves what later rows attend to, and no more


Learnt = TypeVar("Learnt")  # what a proposer hands from `prefill` and `extend` to `propose`, of each slot; its own


class Proposer(Protocol[Learnt]):
    """Makes guesses; what it remembers from step to step it keeps in rows indexed by slot."""

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Learnt:
        """Absorb prompt chunks. Returns what it has learnt of each; of prompts that go on it is not used."""

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Learnt:
        """Learn what was committed.

        `batch`, `rows` and `output` are those of the verify forward; of a tree, D rows for each slot at consecutive
        positions from its length: those of the accepted path, first.
        """

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Keep what `extend` would have learnt of a window of one, for `catch_up`."""

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Absorb the last `counts` rows before `batch.lengths`, which were deferred: no more than ABSORBED_ROWS.

        Of more rows the first are absorbed first, in steps of so many. Shapes: counts [B] i64.
        """

    def propose(self, batch: SlotBatch, learnt: Learnt, num_guesses: int) -> Guesses:
        """Guess what follows the roots at `batch.lengths`. K = num_guesses."""


class Verifier(Protocol):
    """Decides which guesses are accepted. `Verification.is_lossy` marks one that changes the target's distribution."""

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        """Give a token for each column of the window: the one to commit after it, if the guesses up to it are accepted.

        A guess is accepted while it is the token after the column before it (a tree's: after its parent), unless
        `Drawn.accept_len` gives their number. `batch.sampling.work` is known to the host: a step of greedy requests
        alone needs no logits. Steps are captured as CUDA graphs: no branch may go by the values of a tensor.

        Pure. Sync: never. Shapes: logits of B * W rows, row j of a slot follows window column j.
        """


@runtime_checkable
class SelfDrafting(Protocol):
    """A proposer whose guesses cost next to nothing. It fills a whole window after every step, whatever its width.

    `extend` and `propose` are called after steps of width 1 too, but not after those that leave the draft out: `extend`
    makes up for these later. `defer` and `catch_up` are never called. Guesses are the same however a request's tokens
    are drawn.
    """

    def report(self, batch: SlotBatch, verdict: Verdict, out: Tensor) -> None:
        """Write what the whole windows of a step promised and which guess was right next, to help to choose widths.

        The three columns are those of `messages.GuessReport`. Called before `extend`.
        Each window is told of once: the levels are -1 until the next one is proposed.
        Shapes: out [B, 3] i64, rows of any stride.
        """

    def forget(self) -> None:
        """Let go of what requests that are gone have said: caches are flushed."""


@dataclass(frozen=True)
class Tree:
    """What a decode step needs to know where guesses are trees."""

    num_levels: int  # of guesses: the most that a step can accept
    move: Callable[[Tensor, Tensor], None]  # KV of the target, in all layers: from cache rows [B, D] to cache rows


@dataclass(frozen=True)
class SpecMethod:
    """A method, loaded: who guesses, who judges, and what is kept of a window that is a tree."""

    proposer: Proposer[Any]
    verifier: Verifier
    tree: Tree | None = None  # None: windows are chains, whose KV is where it belongs

    def draft_work(self, work: SamplingWork) -> SamplingWork:
        """What guesses take of a step's kind of sampling: one captured draft serves all kinds that agree in it.

        A guess meets the processors, the filters and the noise that the target's draw will meet, so that it is accepted
        more often. Nothing else of a kind of sampling changes it.
        """
        if isinstance(self.proposer, SelfDrafting):
            return GREEDY_WORK
        return SamplingWork(work.sampled, work.filtered, work.processed)

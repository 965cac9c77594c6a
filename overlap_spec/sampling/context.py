"""How slots draw, which rows tokens are drawn for, and what comes before each: the history, then guesses of the window.

    committed (token pool)           guesses                  rows
    x0 x1 .. xL  (xL: the root)      a, b follow the root     one after each node: root, a, b, c
                                     c follows a              the token after c has  x0 .. xL a c  before it

Everything here is computed when a logit processor asks for it, with tensors of static shapes, so that it can be
captured. A step whose requests need none of it launches none of it: `SamplingWork` is what the host knows of that.

**The token pool** has the token of every row of the KV cache: each request's history, on the device, addressed as its
KV is. A request's token at position p is at the cache row of p, through the request's page table. So a prefix that was
found in the cache has its tokens here as well as its KV, a request that was preempted has its tokens again when its KV
is again computed, and nothing is copied when a slot changes hands. Every step writes what it commits: a prefill its
chunks and the tokens it draws, a decode step its committed run, whatever the method.

    positions   0 .. L-1        L           between two steps, at length L
    pool        committed       the root    later rows are stale
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol

import torch
from overlap_spec_kernels import TokenRows, cache_rows, count_tokens, forbid_tokens, guesses_before, store_tokens
from torch import Tensor


@dataclass(frozen=True)
class SamplingWork:
    """What kinds of sampling a step has to do, known to the host: greedy requests alone launch none of it."""

    sampled: bool
    filtered: bool  # some request has top_k, top_p or min_p
    processed: bool  # some request's parameters change its logits
    outputs: bool = False  # some request asks for outputs beside its tokens
    of_target: bool = False  # some request asks for a stage of the target's rows alone

    def covers(self, other: "SamplingWork") -> bool:
        """Whether a step prepared for this does all that the other asks for."""
        return all(getattr(self, kind.name) or not getattr(other, kind.name) for kind in fields(other))


# What a step can be prepared for, cheapest first: each does the work of those that it covers, at its own price. A
# batch takes the first that covers all of its requests; every one is captured. They are kinds of stages and outputs,
# not single ones: a feature more adds no kind.
SAMPLING_WORK = (
    SamplingWork(False, False, False),  # greedy
    SamplingWork(True, False, False),  # sampled
    SamplingWork(False, False, False, of_target=True),  # guesses are drawn as in greedy ones
    SamplingWork(True, False, False, of_target=True),
    SamplingWork(True, False, True, of_target=True),  # processed
    SamplingWork(True, True, False),  # filtered: up to four more passes over the logits
    SamplingWork(True, True, True, of_target=True),  # both
    SamplingWork(True, False, True, outputs=True, of_target=True),
    SamplingWork(True, True, True, outputs=True, of_target=True),  # everything
)
GREEDY_WORK, EVERY_WORK = SAMPLING_WORK[0], SAMPLING_WORK[-1]
COMMON_WORK = tuple(kind for kind in SAMPLING_WORK if not (kind.processed or kind.of_target))  # what most requests ask


def cheapest_work(asked: Iterable[SamplingWork]) -> SamplingWork:
    """The first kind that does all of this. Of a large batch most are one object: each object is looked at once."""
    distinct = {id(work): work for work in asked}.values()
    return next(kind for kind in SAMPLING_WORK if all(map(kind.covers, distinct)))


POOL_TOKEN_BYTES = torch.int32.itemsize


@dataclass(frozen=True)
class TokenPool:
    """R rows, as many as the KV cache has."""

    tokens: Tensor  # [R] i32
    page_size: int

    @staticmethod
    def allocate(num_pages: int, page_size: int, device: torch.device) -> "TokenPool":
        return TokenPool(torch.zeros(num_pages * page_size, dtype=torch.int32, device=device), page_size)

    def rows_of(self, page_table: Tensor) -> TokenRows:
        """What a kernel needs to write tokens of a batch. Shapes: page_table [B, P] i32."""
        return TokenRows(self.tokens, page_table, self.page_size)

    def write_chunks(self, rows: Tensor, tokens: Tensor) -> None:
        """Write prompt chunks. Sync: never. Shapes: rows (of the cache), tokens [T] i64."""
        self.tokens[rows] = tokens.int()

    def write(self, page_table: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write a token of each request. Sync: never. Shapes: page_table [B, P] i32, positions, tokens [B] i64."""
        store_tokens(*self.rows_of(page_table), positions, tokens[:, None], torch.ones_like(positions))

    def read(self, page_table: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        """Tokens at positions, -1 outside 0..ends - 1. Sync: never.

        Entries of the page table past a request's end may be unwritten memory, and are not followed.
        Shapes: page_table [B, P] i32, positions [B, n] i64, ends [B] i64 -> [B, n] i64.
        """
        inside = (positions >= 0) & (positions < ends[:, None])
        rows = cache_rows(page_table, positions.masked_fill(~inside, 0), self.page_size)
        return self.tokens[rows].long().masked_fill(~inside, -1)


class Stages(Protocol):
    """What an engine does to logits before tokens are drawn from them."""

    @property
    def vocab_size(self) -> int: ...  # of the target

    @property
    def pool(self) -> TokenPool: ...

    def active(self, work: SamplingWork) -> bool:
        """Whether `apply` changes logits."""

    def apply(self, logits: Tensor, context: "DrawContext") -> Tensor:
        """May change the logits it is given. Sync: never. Shapes: [B, R, N] -> [B, R, N]."""


@dataclass(frozen=True)
class Sampling:
    """How each slot of a step draws its tokens, gathered from the slot rows."""

    temperature: Tensor  # [B] f64, 0 = greedy
    top_k: Tensor  # [B] i64, V or more = all
    top_p: Tensor  # [B] f64
    min_p: Tensor  # [B] f64
    seed: Tensor  # [B] i64
    stop_from: Tensor  # [B] i64, first absolute position at which a stop id may be drawn
    stop_ids: Tensor  # [B, M] i64, padded with -1
    output_from: Tensor  # [B] i64, position of the request's first output token
    slots: Tensor  # [B] i64, rows of what the processors keep of each slot
    work: SamplingWork
    processors: "Stages"  # the engine's

    @property
    def needs_logits(self) -> bool:
        """Whether more is asked for than the column of the largest logit."""
        return self.work.sampled or self.processors.active(self.work)


@dataclass(frozen=True)
class Path:
    """Guesses between the committed tokens and the rows, G of each slot; the default is no guess and one row.

    A node is the index of a guess; `root` means the last committed token, root - 1 for the one before it, ..
    """

    tokens: Tensor | tuple[Tensor, ...] = ()  # [B, G] i64, or a column [B] for each
    parents: Tensor | None = None  # [B, G] i64: the node that a guess follows, below its own; None: the one before
    nodes: Tensor | None = None  # [B, R] i64: the node that each row follows; None: the last R
    root: int = -1
    depth: int = 0  # guesses before a row, at most


@dataclass(frozen=True)
class History:
    """What is committed to the slots of a step. What is computed of it is computed once for all rows, and drafts."""

    sampling: Sampling
    page_table: Tensor  # [B, P] i32
    roots: Tensor  # [B] i64: position of the last committed token

    @cached_property
    def committed(self) -> Tensor:
        """Every slot's tokens by position, the prompt's too; -1 after the root. Sync: never.

        Shapes: -> [B, T] i64, T positions of a whole page table.
        """
        pool = self.sampling.processors.pool
        positions = torch.arange(self.page_table.shape[1] * pool.page_size, device=self.roots.device)
        return pool.read(self.page_table, positions.expand(len(self.roots), -1), self.roots + 1)

    @cached_property
    def counts(self) -> Tensor:
        """How often each token is in the output, plus `IN_PROMPT` where it is in the prompt. Sync: never.

        Shapes: -> [B, V] i32.
        """
        processors = self.sampling.processors
        rows = processors.pool.rows_of(self.page_table)
        return count_tokens(rows, self.roots, self.sampling.output_from, processors.vocab_size)


@dataclass(frozen=True)
class DrawContext:
    """R rows of each of B slots; a token is drawn after each."""

    history: History
    token_ids: Tensor  # [N] i64: the target's token of each column of the logits
    rows: Tensor  # [B, R] i64: `offset` positions before the rows
    offset: int = 0
    path: Path = Path()
    of_target: bool = False  # the target's: one row for each column of the window

    @property
    def sampling(self) -> Sampling:
        return self.history.sampling

    @property
    def committed(self) -> Tensor:
        """Every slot's tokens by position, the prompt's too; -1 after the root. Shapes: -> [B, T] i64."""
        return self.history.committed

    @cached_property
    def positions(self) -> Tensor:
        """Of the tokens that are drawn. Shapes: -> [B, R] i64."""
        return self.rows + (self.offset + 1)

    @property
    def depth(self) -> int:
        """Guesses before a row, at most: what comes before those is committed."""
        return self.path.depth

    @property
    def output_from(self) -> Tensor:
        """Position of each slot's first output token, also after a preemption. Shapes: -> [B] i64."""
        return self.sampling.output_from

    def recent(self, count: int) -> Tensor:
        """The last `count` tokens before each drawn one, in order: guesses, and committed ones before those.

        -1 before a request's first token, and where there is no guess. Sync: never. Shapes: -> [B, R, count] i64.
        """
        path, pool, found = self.path, self.sampling.processors.pool, []
        table, roots = self.history.page_table, self.history.roots
        tokens, node, ends = self._guesses(), self._nodes(), roots + 1
        for _ in range(count):
            behind = (node - path.root).clamp(max=0)
            here = pool.read(table, roots[:, None] + behind, ends)
            above = node - 1
            if tokens is not None:
                guess = node.clamp(min=0)
                here = torch.where(node > path.root, tokens.gather(1, guess), here)
                if path.parents is not None:
                    parent = torch.minimum(path.parents.gather(1, guess), above)
                    above = torch.where(node > path.root, parent, above)
            found.append(here)
            node = above
        return torch.stack(found[::-1], 2)

    @cached_property
    def guesses(self) -> Tensor:
        """The guesses before each row, in order; -1 before the first of them. Shapes: -> [B, R, depth] i64."""
        path, tokens = self.path, self._guesses()
        if tokens is None or self.depth == 0:
            return self.rows.new_empty(*self.rows.shape, 0)
        if not isinstance(path.tokens, Tensor):  # of a chain on its way: its only row follows all of them
            return tokens[:, None]
        return guesses_before(tokens, path.parents, path.nodes, self.rows.shape[1], self.depth, path.root)

    def forbid(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """-inf for these tokens; what is no token, or none of the columns', changes nothing. Sync: never.

        Shapes: logits [B, R, N], tokens (target ids) [B, R, n] i64 -> [B, R, N].
        """
        return forbid_tokens(logits.clone(), tokens, self.token_ids, self.sampling.processors.vocab_size)

    def _guesses(self) -> Tensor | None:
        """Shapes: -> [B, G] i64."""
        tokens = self.path.tokens
        if isinstance(tokens, Tensor):
            return tokens if tokens.shape[1] else None
        return torch.stack(tokens, 1) if tokens else None

    def _nodes(self) -> Tensor:
        """Shapes: -> [B, R] i64."""
        if self.path.nodes is not None:
            return self.path.nodes
        tokens, num_rows = self.path.tokens, self.rows.shape[1]
        end = tokens.shape[1] if isinstance(tokens, Tensor) else len(tokens)
        return torch.arange(end - num_rows, end, device=self.rows.device).expand(len(self.rows), -1)

"""Turns matches into guesses: merges the continuations of a request's matches, its own and the log's, into one tree.

The continuation of a match is a path of tokens; paths with a common prefix share nodes. Matches rank by length, then
own ones first, then the latest first:

    rank 0   x y z        root - x - y - z        by recency: nodes of longer matches first, then level by level
    rank 1   x y w                    \\ w         by frequency: the most probable first, a match's vote its length
    rank 2   v               \\ v

By recency, a node's number of children shrinks with the c tokens that agree up to it: at most
min_breadth + (branch - 1 - c) (max_breadth - min_breadth) / (branch - 1), as in SGLang. By frequency: max_breadth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import require, runs_triton
from overlap_spec_kernels.limits import MAX_TREE_WIDTH
from overlap_spec_kernels.ngram._ngram_merge_kernel import merge_on_device
from overlap_spec_kernels.ngram.ngram_log import PAGE, NgramLimits, NgramLog, entry_of, first_hash, next_hash
from overlap_spec_kernels.ngram.ngram_match import MATCH_SHIFT, OWN_BIT, OWN_MATCHES
from overlap_spec_kernels.window.store_tokens import cache_rows

_PLACE = OWN_BIT - 1  # a key's bits that hold its place
_PROBABILITY_BITS = 20


class MergedGuesses(NamedTuple):
    """Guesses of each row, best first."""

    tokens: Tensor  # [K, B] i64, -1: none
    parents: Tensor  # [K, B] i64: window column of each guess's parent, 0 is the root
    levels: Tensor  # [B] i64: level of the deepest guess
    strength: Tensor  # [B] i64: length of the longest match that leads to a guess


def ngram_merge(
    keys: Tensor,
    log: NgramLog,
    limits: NgramLimits,
    pool: Tensor,
    page_table: Tensor,
    page_size: int,
    slots: Tensor,
    lengths: Tensor,
    num_guesses: int,
) -> MergedGuesses:
    """The best `num_guesses` nodes, parents before children; siblings are distinct.

    If an own match is so near the end that too few tokens follow it, they repeat as a period. The log contributes, for
    each of `limits.sizes`, the latest occurrence of that n-gram in what the slot's owner said, extended for as long as
    the tokens agree.
    Shapes: keys [B, n] i64 (`ngram_match`), pool [R] i32, page_table [B, P] i32, slots [B] i64, lengths [B] i64:
    position of the last token. Raises: ValueError naming the argument. Sync: never.
    """
    require(keys.dim() == 2 and keys.dtype == torch.int64 and keys.is_contiguous(), "keys", "[B, n] int64")
    require(pool.dim() == 1 and pool.dtype == torch.int32 and pool.is_contiguous(), "pool", "[R] int32")
    require(page_table.dim() == 2 and page_table.dtype == torch.int32, "page_table", "[B, P] int32")
    require(page_table.stride(1) == 1 and len(page_table) == len(keys), "page_table", "[B, P], contiguous rows")
    for name, value in {"slots": slots, "lengths": lengths}.items():
        require(value.shape == keys.shape[:1] and value.dtype == torch.int64, name, "[B] int64")
        require(value.is_contiguous(), name, "contiguous")
    require(1 <= num_guesses < MAX_TREE_WIDTH, "num_guesses", "1 to 63")
    arguments = keys, log, limits, pool, page_table, page_size, slots, lengths, num_guesses
    return MergedGuesses(*merge_on_device(*arguments)) if runs_triton(pool) else ngram_merge_reference(*arguments)


def ngram_merge_reference(
    keys: Tensor,
    log: NgramLog,
    limits: NgramLimits,
    pool: Tensor,
    page_table: Tensor,
    page_size: int,
    slots: Tensor,
    lengths: Tensor,
    num_guesses: int,
) -> MergedGuesses:
    num_levels = min(limits.branch, num_guesses)
    own = keys.topk(min(OWN_MATCHES, keys.shape[1]), dim=1).values
    own_rows = _following(own.clamp(min=0) & _PLACE, lengths, num_levels)
    own_tokens = pool[cache_rows(page_table, own_rows.flatten(1), page_size)].view_as(own_rows).long()
    known = pool[cache_rows(page_table, lengths[:, None] - torch.arange(limits.max_match), page_size)].long()
    known = known.masked_fill(torch.arange(limits.max_match) > lengths[:, None], -1)
    shared, shared_tokens = _in_log(log, limits, slots, known, num_levels)
    keys, paths = torch.cat((own, shared), 1), torch.cat((own_tokens, shared_tokens), 1)
    most = max(int((keys >= 0).sum(1).max()), 1)  # usually few; the kernel takes them all
    keys, order = keys.topk(most, dim=1)
    paths = paths.gather(1, order[:, :, None].expand(-1, -1, num_levels)).masked_fill(keys[:, :, None] < 0, -1)
    return _best(*_tree(keys >> MATCH_SHIFT, paths, limits), paths, keys >> MATCH_SHIFT, num_guesses)


def _following(places: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Positions after own matches, repeating as a period. Shapes: places [B, C] -> [B, C, count]."""
    period = (lengths[:, None] - places).clamp(min=1)[:, :, None]
    return places[:, :, None] + 1 + torch.arange(count, device=places.device) % period


def _in_log(log: NgramLog, limits: NgramLimits, slots: Tensor, known: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find matches in the log.

    Shapes: known [B, M], the last token first, -1: none -> keys [B, C], tokens [B, C, count].
    """
    owner, found = log.owner[slots], []
    state, bands = first_hash(owner), None if int(log.stride) == 1 else log.bands[slots]
    for back in range(limits.max_match):
        state = next_hash(state, known[:, back])
        if back + 1 in limits.sizes:
            found.append(log.places[entry_of(state, bands, log.places)] - 1)
    places = torch.stack(found, 1)
    number, offset = places // PAGE, places % PAGE
    row = number % len(log.fill)
    alive = (places >= 0) & (log.pages[row] == number) & (log.owners[row] == owner[:, None])
    before = offset[:, :, None] - torch.arange(limits.max_match, device=known.device)
    logged = log.tokens[row[:, :, None], before.clamp(min=0)]
    agrees = (logged == known[:, None]) & (before >= 0) & (known[:, None] >= 0)
    matched = agrees.long().cumprod(2).sum(2)
    repeated = (places[:, :, None] == places[:, None]).tril(-1).any(2)
    alive &= (matched >= limits.min_match) & ~repeated
    after = offset[:, :, None] + 1 + torch.arange(count, device=known.device)
    tokens = log.tokens[row[:, :, None], after.clamp(max=PAGE - 1)].long()
    tokens = tokens.masked_fill(after >= log.fill[row].long()[:, :, None], -1)
    return (matched << MATCH_SHIFT | places).masked_fill(~alive, -1), tokens


def _tree(matched: Tensor, paths: Tensor, limits: NgramLimits) -> tuple[Tensor, Tensor]:
    """Merge paths into a tree. A node that several paths share is owned by the first of them.

    Shapes: matched [B, C], paths [B, C, L], in the order of rank -> order, parent [B, L, C]: a larger order is a better
    node, -1 none; `parent` is the rank of the path that owns the node above.
    """
    num_paths = matched.shape[1]
    rank = torch.arange(num_paths, device=matched.device)
    owner, alive = torch.zeros_like(matched), matched > 0
    probability = torch.full_like(matched, 1 << _PROBABILITY_BITS)
    orders, parents = [], []
    for level in range(paths.shape[2]):
        token = paths[:, :, level]
        alive = alive & (token >= 0)
        siblings = (owner[:, :, None] == owner[:, None]) & alive[:, None]
        same = siblings & (token[:, :, None] == token[:, None]) & alive[:, :, None]
        first = torch.where(same, rank, num_paths).amin(2)
        is_node = first == rank
        before = rank < rank[:, None]
        if limits.by_frequency:
            weight = (same * matched[:, None]).sum(2)
            equal = weight[:, None] == weight[:, :, None]
            before = (weight[:, None] > weight[:, :, None]) | (equal & before)
            kept = is_node & ((is_node[:, None] & siblings & before).sum(2) < limits.max_breadth)
            total = ((kept[:, None] & siblings) * weight[:, None]).sum(2).clamp(min=1)
            value = probability = probability * ((weight << _PROBABILITY_BITS) // total) >> _PROBABILITY_BITS
        else:
            number = (is_node[:, None] & siblings & before).sum(2)
            kept, value = is_node & (number < _breadth(matched + level, limits)), matched
        orders.append((value << 12 | (62 - level) << 6 | (63 - rank)).masked_fill(~kept, -1))
        parents.append(owner)
        alive = alive & kept.gather(1, first.clamp(max=num_paths - 1))
        owner = first
    return torch.stack(orders, 1), torch.stack(parents, 1)


def _breadth(matched: Tensor, limits: NgramLimits) -> Tensor:
    longest = max(1, limits.branch - 1)
    more = (longest - matched).clamp(min=0) * (limits.max_breadth - limits.min_breadth) // longest
    return limits.min_breadth + more


def _best(order: Tensor, parent: Tensor, paths: Tensor, matched: Tensor, num_guesses: int) -> MergedGuesses:
    """Shapes: order, parent [B, L, C], paths [B, C, L], matched [B, C]."""
    num_rows, num_levels, num_paths = order.shape
    count = min(num_guesses, num_levels * num_paths)
    best, node = order.flatten(1).topk(count, dim=1)
    is_guess, level, rank = best >= 0, node // num_paths, node % num_paths
    tokens = paths[torch.arange(num_rows)[:, None], rank, level].masked_fill(~is_guess, -1)
    columns = torch.zeros(num_rows, num_levels * num_paths, dtype=torch.int64, device=order.device)
    columns.scatter_(1, node, torch.arange(1, count + 1, device=order.device).expand_as(node))
    above = (level - 1).clamp(min=0) * num_paths + parent.flatten(1).gather(1, node)
    parents = columns.gather(1, above).masked_fill((level == 0) | ~is_guess, 0)
    levels = (level + 1).masked_fill(~is_guess, 0).amax(1)
    strength = matched[:, 0].clamp(min=0).masked_fill(levels == 0, 0)
    missing = num_guesses - count
    tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
    return MergedGuesses(
        tokens.t().contiguous(),
        torch.nn.functional.pad(parents, (0, missing)).t().contiguous(),
        levels,
        strength,
    )

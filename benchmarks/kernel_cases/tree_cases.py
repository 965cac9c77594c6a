"""Calls of the ops on trees of guesses, as a step makes them.

`num_rows` of a case are slots: a slot's window has as many rows as its tree has columns, and a level of its draft as
many as are expanded.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from overlap_spec_kernels.attention.decode_attention import DecodeScratch
from overlap_spec_kernels.attention.move_cache_rows import move_cache_rows, move_cache_rows_reference
from overlap_spec_kernels.attention.tree_attention import tree_attention, tree_attention_reference
from overlap_spec_kernels.launch import ceil_div
from overlap_spec_kernels.tree.add_children import Candidates, add_children, add_children_reference
from overlap_spec_kernels.tree.expand_tree import expand_tree, expand_tree_reference
from overlap_spec_kernels.tree.marginal_tree import marginal_tree, marginal_tree_reference
from overlap_spec_kernels.tree.select_tree import select_tree, select_tree_reference
from overlap_spec_kernels.tree.top_tokens import top_tokens, top_tokens_reference
from overlap_spec_kernels.window.gather_tree import gather_tree, gather_tree_reference
from overlap_spec_kernels.window.judge_tree import judge_tree, judge_tree_reference
from overlap_spec_kernels.window.place_tree import place_tree, place_tree_reference
from torch import Tensor

from kernel_cases.inputs import to_device, tree_inputs
from kernel_cases.shapes import DTYPE, PAGE_SIZE, Shape, assert_alike, bytes_of, random_rows, size_of
from kernel_cases.step_cases import CAPACITY, Place, StepCase, case_of

PREFIX = 400
NUM_LAYERS = 32
MAX_VOCABULARY = 49152  # of a draft
MOVED = 2  # guesses that stand


class Tree(NamedTuple):
    """As flags say it: --speculative-num-steps, -eagle-topk, -num-draft-tokens."""

    num_steps: int
    topk: int
    width: int


SMALL = Tree(5, 4, 16)
TREES = {"SmolLM2-135M": SMALL, "Llama-3.1-8B": Tree(5, 8, 32)}


def tree_cases(model: str, shape: Shape, place: Place) -> Iterator[StepCase]:
    """Every op of a step on trees that depends on the model."""
    tree = TREES.get(model, SMALL)
    for make in (tree_attention_cases, level_cases, top_cases, move_cases):
        for case in make(shape, tree, place):
            yield case._replace(model=model)


def tree_attention_cases(shape: Shape, tree: Tree, place: Place) -> Iterator[StepCase]:
    """The target's rows, which see each other; the last level of the draft's, which sees those before it."""
    heads, device = shape.heads, torch.device(place.device)
    scratch = DecodeScratch.allocate(heads.head_dim, device)
    spare = (CAPACITY - PREFIX) // PAGE_SIZE - 1
    for rows, extra in ((tree.width, tree.width), (tree.topk, (tree.num_steps - 1) * tree.topk)):
        for num_slots in place.num_rows:
            drawn = tree_inputs(heads, rows, extra, [PREFIX] * num_slots, PAGE_SIZE, DTYPE, spare)
            q, k_cache, v_cache, *rest, scale = (to_device(value, place.device) for value in drawn)
            assert isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)
            cached = 2 * num_slots * (PREFIX + extra) * heads.num_kv_heads * heads.head_dim * DTYPE.itemsize
            inputs = [
                (q, k_cache.clone(), v_cache.clone(), *rest, scale, None, scratch) for _ in range(place.copies(cached))
            ]
            moved = cached + 2 * size_of(q)
            yield case_of(tree_attention, _attention_reference, inputs, moved, f"{rows} rows, {extra} extra", num_slots)


def _attention_reference(*values: Any) -> Tensor:
    *inputs, _, _ = values
    return tree_attention_reference(*inputs)


def level_cases(shape: Shape, tree: Tree, place: Place) -> Iterator[StepCase]:
    """The children of a level's nodes; the next level's nodes with their features, which are a hidden state."""
    topk, device = tree.topk, place.device
    for num_slots in place.num_rows:
        log_probs = torch.randn(num_slots, topk * topk, device=device)
        tokens = torch.randint(shape.draft_vocabulary, log_probs.shape, device=device)
        mask = torch.ones(num_slots, topk, 1, dtype=torch.int64, device=device)
        logs, columns = -torch.rand(num_slots, topk, topk, device=device), tokens.view(num_slots, topk, topk)
        candidates = Candidates.allocate(num_slots, topk * topk, log_probs.dtype, torch.device(device))
        ids, nodes = torch.arange(shape.draft_vocabulary, device=device), columns[:, :, 0].contiguous()
        children = (candidates, 0, logs, columns, ids, logs[:, :, 0].contiguous(), nodes)
        yield StepCase(
            add_children.__name__,
            "",
            f"{topk} of {topk} nodes",
            num_slots,
            bytes_of((logs, columns, *candidates)),
            [partial(add_children, *children)],
            partial(check_children, *children),
        )
        features = random_rows(device, num_slots * topk, shape.hidden)
        level = (log_probs, tokens, mask, features, mask[0].clone())
        moved = bytes_of(level) + size_of(features)
        yield case_of(expand_tree, expand_tree_reference, [level], moved, f"{topk} of {topk * topk}", num_slots)


def check_children(candidates: Candidates, first: int, *children: Tensor) -> None:
    """Raises: AssertionError."""
    expected = Candidates(*(part.clone() for part in candidates))
    add_children(candidates, first, *children)
    add_children_reference(expected, first, *children)
    assert_alike(tuple(candidates), tuple(expected))


def top_cases(shape: Shape, tree: Tree, place: Place) -> Iterator[StepCase]:
    """Children of a level's nodes: logits that the head has just written."""
    for size in sorted({shape.draft_vocabulary, min(shape.vocabulary, MAX_VOCABULARY)}):
        for num_slots in place.num_rows:
            logits = torch.randn(num_slots * tree.topk, size, device=place.device)
            inputs, name = [(logits, tree.topk)], f"{tree.topk} rows of {size}, top {tree.topk}"
            yield case_of(top_tokens, top_tokens_reference, inputs, size_of(logits), name, num_slots)


def move_cases(shape: Shape, tree: Tree, place: Place) -> Iterator[StepCase]:
    """Some of the path's rows go elsewhere; the root's, and those that did not survive, stay."""
    size = (NUM_LAYERS, 1, PAGE_SIZE, shape.heads.num_kv_heads, shape.heads.head_dim)
    depth = tree.num_steps + 1
    for num_slots in place.num_rows:
        k, v = (random_rows(place.device, size[0], num_slots * 2, *size[2:]) for _ in range(2))
        target = torch.arange(num_slots, device=place.device)[:, None] * (2 * PAGE_SIZE)
        target = target + torch.arange(depth, device=place.device)
        source = target.clone()
        source[:, 1 : 1 + MOVED] += tree.topk
        moved = 2 * MOVED * (size_of(k) + size_of(v)) // (2 * PAGE_SIZE)
        arguments = (k, v, source, target)
        yield StepCase(
            move_cache_rows.__name__,
            "",
            f"{MOVED} rows, {NUM_LAYERS} layers",
            num_slots,
            moved,
            [partial(move_cache_rows, *arguments)],
            partial(check_move, *arguments),
        )


def check_move(k: Tensor, v: Tensor, source: Tensor, target: Tensor) -> None:
    """Raises: AssertionError."""
    actual, expected = (k.clone(), v.clone()), (k.clone(), v.clone())
    move_cache_rows(*actual, source, target)
    move_cache_rows_reference(*expected, source, target)
    assert_alike(actual, expected)


def tree_slot_cases(place: Place) -> Iterator[StepCase]:
    """The ops on slot rows and candidates, which are the same for every model."""
    for tree in TREES.values():
        for num_slots in place.num_rows:
            yield from one_step(tree, num_slots, place.device)


def one_step(tree: Tree, num_slots: int, device: str) -> Iterator[StepCase]:
    """With the tree of each slot a random one, parents first."""
    (num_steps, topk, width), name = tree, f"{tree.width} columns"
    slots = torch.randperm(num_slots, device=device)
    length = torch.full((num_slots + 1,), PREFIX, device=device)
    window = torch.randint(4, (num_slots + 1, width), device=device)
    parents = (torch.rand(window.shape, device=device) * torch.arange(width, device=device)).long()
    num_pages = ceil_div(PREFIX + 2 * width, PAGE_SIZE)  # as many as are gathered
    table = torch.randint(1 << 20, (num_slots + 1, num_pages), dtype=torch.int32, device=device)
    gathered = (slots, length, window, parents, table, width, PAGE_SIZE)
    out = gather_tree_reference(*gathered)
    yield case_of(gather_tree, gather_tree_reference, [gathered], 2 * bytes_of(out), name, num_slots)

    drawn = torch.randint(4, (num_slots, width), device=device)
    judged = (drawn, out.window_tokens, out.parents, slots, out.lengths, length.clone(), window.clone())
    rest = (num_slots, num_steps + 1)
    moved = bytes_of(judge_tree_reference(*judged, *rest)) + bytes_of(judged[:5])
    yield case_of(judge_tree, judge_tree_reference, [(*judged, *rest)], moved, name, num_slots)

    num_candidates = topk + (num_steps - 1) * topk * topk
    scores = torch.randn(num_slots, num_candidates, device=device).sort(dim=1, descending=True).values  # parents first
    above = torch.arange(num_candidates, device=device).expand(num_slots, -1).contiguous() - 1
    candidates = (scores, above + 1, above, width - 1)
    kept = select_tree_reference(*candidates)
    moved = bytes_of(candidates) + bytes_of(kept)
    yield case_of(
        select_tree, select_tree_reference, [candidates], moved, f"{width - 1} of {num_candidates}", num_slots
    )

    logs = torch.randn(num_steps, num_slots, topk, device=device).sort(dim=2, descending=True).values - 4
    columns = torch.randint(1 << 15, logs.shape, device=device)
    marginals = (logs, columns, torch.arange(1 << 15, device=device), width - 1)
    moved = bytes_of((logs, columns)) + bytes_of(kept)
    name_of_levels = f"{width - 1} of {num_steps} levels of {topk}"
    yield case_of(marginal_tree, marginal_tree_reference, [marginals], moved, name_of_levels, num_slots)

    placed = (window.clone(), parents.clone(), slots, *kept, torch.full_like(length, width), num_slots)
    yield case_of(place_tree, place_tree_reference, [placed], 2 * bytes_of(kept), f"{width - 1} guesses", num_slots)

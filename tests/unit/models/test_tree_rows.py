"""A tree in one forward: every row is what its path alone would give, in every family, with windows smaller than it."""

from dataclasses import replace

import pytest
import torch
from support.paged_rows import Paged
from support.tiny.families import RECURRENT, TINY_FAMILIES
from support.tiny.models import CPU, load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TargetModel, TreeKeys
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention_choice import AttentionChoice

F64 = torch.float64
PARENTS = [0, 0, 0, 1, 1, 3, 5, 2, 6, 8, 9]
PROMPTS = [list(range(20, 31)), [9, 40, 77]]


def ancestors(column: int) -> list[int]:
    """From the root's on, the column's own last."""
    return [column] if column == 0 else [*ancestors(PARENTS[column]), column]


def tree_batch(paged: Paged, extra_rows: Tensor | None = None) -> RowBatch:
    """The tree after every request's committed rows; their K/V goes where a window's would, or to `extra_rows`."""
    width = len(PARENTS)
    lengths = torch.tensor(paged.lengths)
    places = lengths[:, None] + torch.arange(width)
    if extra_rows is None:
        pages = paged.page_table.gather(1, places // paged.page_size).long()
        extra_rows = pages * paged.page_size + places % paged.page_size
    depths = torch.tensor([len(ancestors(column)) - 1 for column in range(width)])
    positions = lengths[:, None] + depths
    mask = torch.tensor([sum(1 << i for i in ancestors(column)) for column in range(width)])
    words = mask[None, :, None].repeat(len(lengths), 1, 1)
    tree = TreeKeys(lengths, extra_rows, words, positions, int(depths.max()) + 1)
    return RowBatch(positions.flatten(), extra_rows.flatten(), paged.page_table, None, width, True, tree)


def attached(family: str, paged: Paged, choice: AttentionChoice, spare_rows: int = 0) -> TargetModel:
    weights = load_tiny_target(tiny_target(3, **TINY_FAMILIES[family]))
    cache = KVCache.allocate(weights.kv_shape, paged.num_pages, paged.page_size, F64, CPU, spare_rows)
    return weights.attach(cache, 64, (), choice)


def test_a_row_of_a_tree_has_sinks() -> None:
    check_rows_of_trees("gpt oss", False, AttentionChoice())


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(13)
@pytest.mark.parametrize("choice", [AttentionChoice(), AttentionChoice(torch_only=True), AttentionChoice(most_keys=3)])
@pytest.mark.parametrize("behind_pages", [False, True])
@pytest.mark.parametrize("family", [name for name in TINY_FAMILIES if name not in RECURRENT])
def test_a_row_of_a_tree_sees_its_ancestors_alone(family: str, behind_pages: bool, choice: AttentionChoice) -> None:
    check_rows_of_trees(family, behind_pages, choice)


def check_rows_of_trees(family: str, behind_pages: bool, choice: AttentionChoice) -> None:
    paged, width = Paged(num_requests=2), len(PARENTS)
    model = attached(family, paged, choice, 2 * width)
    tokens = torch.randint(128, (2, width), generator=torch.Generator().manual_seed(4))
    prompt = torch.tensor(PROMPTS[0] + PROMPTS[1])
    model.forward(prompt, paged.rows([len(PROMPTS[0]), len(PROMPTS[1])]))
    spare = paged.num_pages * paged.page_size + torch.arange(2 * width).view(2, width) if behind_pages else None
    found = model.forward(tokens.flatten(), tree_batch(paged, spare)).hidden.view(2, width, -1)
    for column in range(width):
        path = ancestors(column)
        rows = paged.rows([len(path)] * 2, commit=False)
        expected = model.forward(tokens[:, path].flatten(), rows).hidden.view(2, len(path), -1)[:, -1]
        torch.testing.assert_close(found[:, column], expected, rtol=0, atol=1e-10)


def test_the_mask_is_needed() -> None:
    """A row that saw its whole window would be noticed."""
    paged, width = Paged(num_requests=2), len(PARENTS)
    model = attached("llama", paged, AttentionChoice())
    tokens = torch.arange(2 * width)
    model.forward(torch.tensor(PROMPTS[0] + PROMPTS[1]), paged.rows([len(PROMPTS[0]), len(PROMPTS[1])]))
    batch = tree_batch(paged)
    assert batch.tree is not None
    everything = replace(batch, tree=replace(batch.tree, mask=torch.full_like(batch.tree.mask, (1 << width) - 1)))
    right, wrong = (model.forward(tokens, rows).hidden for rows in (batch, everything))
    assert not torch.allclose(right, wrong, atol=1e-3)


def test_what_is_kept_of_a_tree_is_moved_in_all_layers() -> None:
    cache = KVCache.allocate(replace(load_tiny_target(tiny_target(3)).kv_shape, num_layers=3), 5, 4, F64, CPU)
    for kv in cache.stacked:
        kv.copy_(torch.randn_like(kv))
    before = [kv.flatten(1, 2).clone() for kv in cache.stacked]
    cache.move(torch.tensor([[4, 6, 9], [12, 13, 14]]), torch.tensor([[4, 5, 6], [12, 13, 14]]))
    for kv, old in zip(cache.stacked, before, strict=True):
        expected = old.clone()
        expected[:, [5, 6]] = old[:, [6, 9]]
        assert torch.equal(kv.flatten(1, 2), expected)
    assert all(torch.equal(layer, kv) for layer, kv in zip(cache.k, cache.stacked[0], strict=True))

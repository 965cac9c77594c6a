"""The C++ kernels of attention, norm and residual on a CPU, against the torch references that serve elsewhere."""

from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import GroupedPart, GroupedWeight, NearKeys, Norm, RowsArgument, linear_add
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write_reference
from support.tiny.grouped import grouped_kernel
from torch import Tensor

PAGE, PAGES = 4, 40
KV_HEADS, SHARE = 2, 3


class Case:
    """Requests of some rows each, behind keys that the cache has."""

    def __init__(self, head_dim: int, rows: tuple[int, ...], before: tuple[int, ...]) -> None:
        random = torch.Generator().manual_seed(head_dim + sum(rows))
        self.num_heads, self.scale = KV_HEADS * SHARE, head_dim**-0.5
        counts = [list(range(first, first + count)) for first, count in zip(before, rows, strict=True)]
        self.positions = torch.tensor([place for each in counts for place in each])
        self.row_starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
        table = torch.randperm(PAGES, generator=random)[: 10 * len(rows)].view(len(rows), 10)
        self.page_table = table.to(torch.int32)
        request = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
        self.cache_rows = table[request, self.positions // PAGE] * PAGE + self.positions % PAGE
        self.qkv = torch.randn(sum(rows), (self.num_heads + 2 * KV_HEADS) * head_dim, generator=random)
        self.cos_sin = torch.randn(50, head_dim, generator=random)
        self.caches = tuple(torch.randn(2, PAGES, PAGE, KV_HEADS, head_dim, generator=random).unbind(0))

    def kernel(self, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        """Results of some rows, which are all there are or a single one, and the caches then."""
        caches = tuple(cache.clone() for cache in self.caches)
        starts, table = self.row_starts, self.page_table
        if rows != slice(None):
            request = int((self.row_starts <= rows.start).sum()) - 1
            starts, table = torch.tensor([0, 1], dtype=torch.int32), table[request : request + 1]
        attend = grouped_kernel().attention
        places = (self.positions[rows], self.cache_rows[rows], starts, table)
        caches = tuple(cache.clone() for cache in self.written) if rows != slice(None) else caches
        out = attend(self.qkv[rows], self.cos_sin, *places, *caches, self.num_heads, self.scale, self.window)
        return out, *caches

    window: int | None = None
    written: tuple[Tensor, ...] = ()


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize(("rows", "before"), [((1,), (0,)), ((4, 1, 7), (21, 9, 0)), ((33,), (3,)), ((2, 5), (0, 30))])
def test_attention(rows: tuple[int, ...], before: tuple[int, ...], head_dim: int, window: int | None) -> None:
    case = Case(head_dim, rows, before)
    case.window = window
    out, *written = case.kernel()
    caches = [cache.clone() for cache in case.caches]
    parts = case.qkv.view(len(case.qkv), -1, head_dim).split((case.num_heads, KV_HEADS, KV_HEADS), dim=1)
    q = rope_kv_write_reference(*parts, case.cos_sin, case.positions, case.cache_rows, *caches)
    args = (q, *caches, case.page_table, case.row_starts, case.positions, case.scale, window)
    expected = paged_attention_reference(*args).flatten(1)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    for mine, theirs in zip(written, caches, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    case.written = tuple(written)
    for row in range(len(case.qkv)):
        alone = case.kernel(slice(row, row + 1))[0]
        assert torch.equal(alone[0], out[row]), "to the bit"


def test_what_it_does_not_take() -> None:
    attend = grouped_kernel().attention
    caches = torch.zeros(2, 3, PAGE, KV_HEADS, 24)
    assert not attend.takes(24, caches[0]) and not attend.takes(16, caches.double())
    assert attend.takes(32, caches[0])


@pytest.mark.parametrize("num_rows", [1, 4, 11])
def test_sum_and_norm(num_rows: int) -> None:
    values, scales = torch.randint(-8, 8, (72, 64), dtype=torch.int8), torch.rand(72, 2)
    weight = GroupedWeight((GroupedPart.packed(values, scales, None, 4, -8, False),), 64, grouped_kernel())
    x, residual = torch.randn(num_rows, 64), torch.randn(num_rows, 80)[:, :72]
    norm = Norm(1 + 0.1 * torch.randn(72), 1e-5)
    found, expected = (linear_add(x, each, residual, norm) for each in (weight, replace(weight, kernel=None)))
    torch.testing.assert_close(found.values, expected.values, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found.normalised(), expected.normalised(), atol=1e-5, rtol=1e-4)
    for row in range(num_rows):
        alone = linear_add(x[row : row + 1], weight, residual[row : row + 1], norm)
        assert torch.equal(alone.weighted[0], found.weighted[row]), "to the bit"


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_a_row_of_a_tree_has_the_bits_of_a_sequence(head_dim: int, window: int | None) -> None:
    """Its ancestors as a sequence behind the prefix; the rows of other branches are beside it in the cache."""
    parents = (-1, 0, 0, 1, 2, 1, 3)  # by column, of both requests
    prefixes, width = (5, 13), len(parents)
    paths = [_path(parents, column) for column in range(width)]
    tree = Case(head_dim, (width, width), prefixes)
    tree.positions = torch.tensor([first + len(path) - 1 for first in prefixes for path in paths])
    mask = torch.tensor([[sum(1 << column for column in path) for path in paths]] * 2)[:, :, None]
    near = NearKeys(
        torch.tensor(prefixes), tree.cache_rows.view(2, width), tree.positions.view(2, width), mask.contiguous()
    )
    tree.window = window
    caches = [cache.clone() for cache in tree.caches]
    found = attended(tree, tree.qkv, tree.positions, tree.cache_rows, tree.row_starts, tree.page_table, caches, near)
    for request, first in enumerate(prefixes):
        for column, path in enumerate(paths):
            rows = torch.tensor(path) + request * width
            places = torch.arange(first, first + len(path))
            table = tree.page_table[request : request + 1]
            cache_rows = table[0].long()[places // PAGE] * PAGE + places % PAGE
            starts = torch.tensor([0, len(path)], dtype=torch.int32)
            caches = [cache.clone() for cache in tree.caches]
            alone = attended(tree, tree.qkv[rows].contiguous(), places, cache_rows, starts, table, caches, None)
            assert torch.equal(alone[-1], found[request * width + column]), (request, column)


def test_a_row_of_a_tree_that_sees_nothing_is_zero() -> None:
    case = Case(16, (2,), (0,))
    near = NearKeys(*(torch.zeros(*shape, dtype=torch.int64) for shape in ((1,), (1, 2), (1, 2), (1, 2, 1))))
    caches = [cache.clone() for cache in case.caches]
    places = (case.positions, case.cache_rows, case.row_starts, case.page_table)
    assert not attended(case, case.qkv, *places, caches, near).any()


@pytest.mark.parametrize(
    ("field", "shape"), [("prefix", (2,)), ("cache_rows", (1, 3)), ("positions", (1, 1)), ("mask", (1, 3, 1))]
)
def test_keys_of_trees_are_checked(field: str, shape: tuple[int, ...]) -> None:
    case = Case(16, (2,), (0,))
    shapes = {"prefix": (1,), "cache_rows": (1, 2), "positions": (1, 2), "mask": (1, 2, 1)} | {field: shape}
    near = NearKeys(**{name: torch.zeros(*each, dtype=torch.int64) for name, each in shapes.items()})
    with pytest.raises(ValueError, match=r"near\."):
        RowsArgument.of(case.positions, case.cache_rows, case.row_starts, case.page_table, PAGE, near)


def _path(parents: tuple[int, ...], column: int) -> list[int]:
    """From the root on."""
    return [] if column < 0 else [*_path(parents, parents[column]), column]


def attended(
    case: Case,
    qkv: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    row_starts: Tensor,
    page_table: Tensor,
    caches: list[Tensor],
    near: NearKeys | None,
) -> Tensor:
    places = (positions, cache_rows, row_starts, page_table)
    kind = (case.num_heads, case.scale, case.window, near)
    return grouped_kernel().attention(qkv, case.cos_sin, *places, *caches, *kind)

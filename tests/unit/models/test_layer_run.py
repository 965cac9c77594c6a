"""All layers in one call of a CPU's kernel: what layer after layer gives, to the bit, whatever threads there are."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import GroupedPart, GroupedWeight, Normed, fused_linear
from support.tiny.grouped import grouped_kernel, with_grouped_linears
from support.tiny.models import CPU, load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, RowsRead
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention_choice import AttentionChoice

PAGES, PAGE_SIZE = 12, 4
STARTS, LENGTHS = (0, 9), (5, 3)  # of two requests
AUX = (0, 1)


def forward(whole: bool, reads_last: bool = False) -> tuple[Tensor, ...]:
    """What the target gives, and its caches then."""
    weights = with_grouped_linears(load_tiny_target(tiny_target(5), torch.float32))
    cache = KVCache.allocate(weights.kv_shape, PAGES, PAGE_SIZE, torch.float32, CPU)
    random = torch.Generator().manual_seed(1)
    for tensor in cache.stacked:
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    aux_layers = () if reads_last else AUX
    target = weights.attach(cache, 64, aux_layers, AttentionChoice(of_rows=grouped_kernel().attention))
    run = target._run_layers
    assert run._whole is not None
    run._whole = run._whole if whole else None
    output = target.forward(torch.arange(sum(LENGTHS)) + 3, rows(reads_last))
    assert isinstance(output.final, Normed)
    return output.final.values, output.final.normalised(), output.aux, *cache.stacked


def rows(reads_last: bool) -> RowBatch:
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(STARTS, LENGTHS, strict=True)])
    table = torch.tensor([[3, 1, 4], [2, 7, 5]], dtype=torch.int32)
    request = torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS))
    cache_rows = table[request, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    row_starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    batch = RowBatch(positions, cache_rows, table, row_starts, max(LENGTHS), False)
    last = row_starts[1:].long() - 1
    single = RowBatch(positions[last], cache_rows[last], table, torch.arange(3, dtype=torch.int32), 1, True)
    return replace(batch, read=RowsRead(last, single)) if reads_last else batch


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_as_layer_after_layer() -> None:
    found, expected = (forward(whole) for whole in (True, False))
    assert all(map(torch.equal, found, expected))
    assert found[2].shape == (sum(LENGTHS), len(AUX) * found[0].shape[1])


def test_of_a_chunk_the_last_rows() -> None:
    (values, normed, aux, *caches), expected = forward(True, reads_last=True), forward(False)
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    assert torch.equal(values, expected[0][last]) and torch.equal(normed, expected[1][last])
    assert aux.numel() == 0 and all(map(torch.equal, caches, expected[3:]))


def test_callers_at_the_same_time(threads: int) -> None:
    """One has the helpers, the others compute alone."""
    random = torch.Generator().manual_seed(2)
    values = torch.randint(-8, 8, (640, 64), dtype=torch.int8, generator=random)
    part = GroupedPart.packed(values, torch.rand(640, 2, generator=random), None, 4, -8, False)
    weight = GroupedWeight((part,), 64, grouped_kernel())
    inputs = [torch.randn(9, 64, generator=random) for _ in range(4)]
    expected = [fused_linear(x, weight) for x in inputs]

    def often(x: Tensor) -> list[Tensor]:
        torch.set_num_threads(threads)
        return [fused_linear(x, weight) for _ in range(200)]

    with ThreadPoolExecutor(len(inputs)) as pool:
        for found, once in zip(pool.map(often, inputs), expected, strict=True):
            assert all(torch.equal(each, once) for each in found)

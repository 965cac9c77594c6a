"""A forward without the layers that are alike launches what the whole one launches, and takes as much memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.operations import operations
from support.peak_bytes import peak_bytes
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, load_tiny_target, tiny_target

from overlap_spec.models.interfaces import RowBatch, RowsRead, TargetModel
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers import layer_run
from overlap_spec.models.layers.layer_run import described, dispensable, skipping_layers
from overlap_spec.models.layers.linear import Linear

NUM_LAYERS, AUX = 14, (1, 6, 11)
PAGES, PAGE_SIZE, ROWS = 8, 4, 9


def attached(family: str = "llama", aux_layers: tuple[int, ...] = AUX) -> TargetModel:
    shape: dict[str, Any] = {**TINY_FAMILIES[family], "layers": NUM_LAYERS}
    weights = load_tiny_target(tiny_target(3, **shape), torch.float64)
    cache = KVCache.allocate(weights.kv_shape, PAGES, PAGE_SIZE, torch.float64, CPU)
    return weights.attach(cache, PAGES * PAGE_SIZE, aux_layers)


def rows(reads_last: bool = False) -> RowBatch:
    positions, starts = torch.arange(ROWS), torch.tensor([0, ROWS], dtype=torch.int32)
    table = torch.arange(PAGES, dtype=torch.int32)[None]
    batch = RowBatch(positions, positions, table, starts, ROWS, False)
    last = torch.tensor([ROWS - 1])
    single = RowBatch(last, last, table, torch.tensor([0, 1], dtype=torch.int32), 1, True)
    return replace(batch, read=RowsRead(last, single)) if reads_last else batch


@contextmanager
def layers_run(target: Any) -> Iterator[list[int]]:
    """The layers that run in the block."""
    run, attention = [], target._run_layers._attention
    call = type(attention).__call__

    def noted(self: Any, index: int, *arguments: Any) -> Any:
        run.append(index)
        return call(self, index, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(attention), "__call__", noted)
        yield run


def test_layers_of_two_kinds() -> None:
    assert dispensable(["a"] * 32, frozenset((2, 16, 29))) == set(range(32)) - {0, 1, 2, 3, 16, 17, 29, 30, 31}
    assert dispensable([*"aaaaab" * 5, "a"], frozenset()) == {
        4,
        *range(6, 11),
        *range(12, 17),
        *range(18, 23),
        *range(24, 30),
    }
    assert dispensable(["a", "b"], frozenset()) == frozenset()


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("reads_last", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma 3"])
def test_launches_and_memory_are_those_of_the_whole_forward(family: str, reads_last: bool) -> None:
    target = attached(family, () if reads_last else AUX)
    batch, tokens = rows(reads_last), torch.arange(ROWS) + 3

    def forward() -> object:
        return target.forward(tokens, batch)

    def with_layers_skipped() -> object:
        with skipping_layers():
            return target.forward(tokens, batch)

    forward()  # a CPU remembers where the rows of its last forward are
    with layers_run(target) as run:
        assert operations(with_layers_skipped) == operations(forward)
    assert len(run) < 2 * NUM_LAYERS and run[-NUM_LAYERS:] == list(range(NUM_LAYERS))
    assert peak_bytes(with_layers_skipped) == peak_bytes(forward)


def test_a_forward_after_one_that_skipped_layers_is_whole() -> None:
    target, batch, tokens = attached(), rows(), torch.arange(ROWS) + 3
    expected = attached().forward(tokens, batch)
    with skipping_layers():
        target.forward(tokens, batch)
    found = target.forward(tokens, batch)
    assert torch.equal(found.hidden, expected.hidden) and torch.equal(found.aux, expected.aux)


def test_layers_of_other_shapes_types_and_constants_are_not_alike() -> None:
    dense = Linear(torch.zeros(4, 8))
    assert described(dense) == described(Linear(torch.ones(4, 8)))
    others = (
        torch.zeros(8, 8),
        torch.zeros(4, 8).double(),
        torch.zeros(8, 4).t(),
        torch.zeros(5, 8).view(-1)[1:33].view(4, 8),
    )
    assert all(described(Linear(other)) != described(dense) for other in others)
    assert described(Linear(dense.stored, torch.zeros(4))) != described(dense)
    assert described((1, dense)) != described((2, dense))


def test_a_model_whose_layers_all_differ_runs_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_run, "described", lambda node: object())
    assert dispensable(list(range(9)), frozenset()) == frozenset()

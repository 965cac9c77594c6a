"""Sums that are written over residuals, as a BLAS does on a GPU: only over those that nothing else reads."""

from typing import Any

import pytest
import torch
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, load_tiny_target, tiny_target

from overlap_spec.models.interfaces import RowBatch, TargetModel
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.linear import Linear

AUX, PAGES, PAGE_SIZE, ROWS = (0, 2), 8, 4, 9


def attached(family: str) -> TargetModel:
    weights = load_tiny_target(tiny_target(3, **{**TINY_FAMILIES[family], "layers": 4}), torch.float64)
    cache = KVCache.allocate(weights.kv_shape, PAGES, PAGE_SIZE, torch.float64, CPU)
    return weights.attach(cache, PAGES * PAGE_SIZE, AUX)


def rows() -> RowBatch:
    positions, starts = torch.arange(ROWS), torch.tensor([0, ROWS], dtype=torch.int32)
    return RowBatch(positions, positions, torch.arange(PAGES, dtype=torch.int32)[None], starts, ROWS, False)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears are fused with their neighbours."""
    monkeypatch.setattr(Linear, "fused", property(lambda self: True))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3 moe", "gemma 3", "gpt oss"])
def test_what_a_draft_reads_is_not_overwritten(family: str, request: pytest.FixtureRequest) -> None:
    expected = attached(family).forward(torch.arange(ROWS) + 3, rows())
    request.getfixturevalue("as_on_a_gpu")
    found = attached(family).forward(torch.arange(ROWS) + 3, rows())
    torch.testing.assert_close(found.aux, expected.aux)
    torch.testing.assert_close(found.hidden, expected.hidden)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_the_first_layer_is_given_is_not_overwritten() -> None:
    run: Any = attached("llama")._run_layers  # type: ignore[attr-defined]
    given = run._layers[0].input_norm.enter(torch.randn(ROWS, run._layers[0].attention.output.out_features).double())
    before = given.values.clone()
    run(given, rows())
    assert torch.equal(given.values, before)

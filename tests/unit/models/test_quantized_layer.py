"""Layers whose linears behind attention run together: what the same layers compute one linear after another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from overlap_spec_kernels import Normed
from support.paged_rows import Paged
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import load_tiny_target, tiny_target
from support.tiny.quantized import quantised

from overlap_spec.models.interfaces import LoadedTarget, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers import quantized_layer
from overlap_spec.models.layers.quantized_layer import QuantizedLayer, in_runs
from overlap_spec.models.quantization.linear import QuantizedLinear
from overlap_spec.models.quantization.stored import StoredWeight

F64 = torch.float64
SIZES: dict[str, Any] = {"hidden": 128, "intermediate_size": 256, "head_dim": 32}


@pytest.fixture(autouse=True)
def _keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears stay in their format, as on a GPU with kernels for it, and the twins multiply."""
    monkeypatch.setattr(StoredWeight, "runs_on", lambda self, device, dtype: True)


def loaded(family: str = "", kept: tuple[str, ...] = ()) -> LoadedTarget:
    changes = TINY_FAMILIES[family] if family else {}
    return load_tiny_target(quantised(tiny_target(3, **SIZES, **changes), "fp8 by row", kept)[0])


def output_of(weights: LoadedTarget, counts: tuple[int, int] = (5, 3)) -> TargetOutput:
    """Of two requests, with the hidden states of all layers but the last."""
    paged = Paged(num_requests=2)
    cache = KVCache.allocate(weights.kv_shape, paged.num_pages, paged.page_size, F64, torch.device("cpu"))
    target = weights.attach(cache, 64, tuple(range(weights.num_layers - 1)))
    return target.forward(torch.arange(sum(counts)) + 3, paged.rows([*counts]))


def assert_the_same(weights: LoadedTarget, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int] = (5, 3)) -> None:
    found = output_of(weights, counts)
    monkeypatch.setattr(quantized_layer, "RUNS", False)
    wanted = output_of(weights, counts)
    assert isinstance(found.final, Normed) and isinstance(wanted.final, Normed)
    assert torch.equal(found.final.normalised(), wanted.final.normalised()) and torch.equal(found.aux, wanted.aux)


@pytest.mark.parametrize("family", ["", "qwen2", "qwen3"], ids=["llama", "a bias", "norms of heads"])
def test_a_run_computes_the_next_qkv(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, calls = loaded(family), []
    product = QuantizedLinear.__call__
    monkeypatch.setattr(QuantizedLinear, "__call__", lambda self, x: (calls.append(self), product(self, x))[1])
    output_of(weights)
    projection = weights.layers[0].attention.qkv
    assert [id(linear) for linear in calls] == [id(getattr(projection, "qkv", projection))]
    assert_the_same(weights, monkeypatch)


def test_many_rows_keep_no_qkv(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, calls = loaded(), []
    product = QuantizedLinear.__call__
    monkeypatch.setattr(QuantizedLinear, "__call__", lambda self, x: (calls.append(self), product(self, x))[1])
    output_of(weights, (12, 5))
    assert len(calls) == weights.num_layers
    assert_the_same(weights, monkeypatch, (12, 5))


def test_all_layers_have_one_kernel() -> None:
    weights = loaded()
    *layers, last = in_runs(weights.layers, weights.norm)
    assert isinstance(last, QuantizedLayer) and last.run.next_qkv is not None and not last.run.reaches_qkv
    for layer, after in zip(layers, weights.layers[1:], strict=True):
        assert isinstance(layer, QuantizedLayer) and layer.run.counter is last.run.counter
        assert layer.run.next_qkv is after.attention.qkv.operand


@pytest.mark.parametrize(("family", "kept"), [("", ("down_proj",)), ("", ("o_proj",)), ("gemma 3", ())])
def test_other_layers_stay_as_they_are(family: str, kept: tuple[str, ...]) -> None:
    weights = loaded(family, kept)
    assert in_runs(weights.layers, weights.norm) == list(weights.layers)


def test_a_layer_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = loaded(kept=("layers.1.mlp.down_proj",))
    layers = in_runs(weights.layers, weights.norm)
    assert layers[1] is weights.layers[1] and isinstance(layers[0], QuantizedLayer)
    assert not layers[0].run.reaches_qkv, "the next layer computes its own"
    assert_the_same(weights, monkeypatch)


def test_a_bias_between_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = loaded()
    first = weights.layers[0]
    output = replace(first.attention.output, bias=torch.randn(128, dtype=F64))
    layers = (replace(first, attention=replace(first.attention, output=output)), *weights.layers[1:])
    biased = replace(weights, layers=layers)
    assert in_runs(layers, weights.norm)[0] is layers[0]
    assert_the_same(biased, monkeypatch)

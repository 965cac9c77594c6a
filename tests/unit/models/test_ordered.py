"""What --enable-deterministic-inference puts in place on a GPU: linears of one order, and keys in parts by position."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from overlap_spec_kernels import (
    Norm,
    Normed,
    OrderedQuantizedWeight,
    QuantizedWeight,
    ordered_attention,
    ordered_windows,
)
from overlap_spec_kernels.attention import latent_heads
from overlap_spec_kernels.attention.latent_heads import head_products
from support.paged_rows import Paged
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, VOCAB, load_tiny_target, tiny_target, write_checkpoint
from torch import Tensor

from overlap_spec.config import AttentionSettings, EngineConfig, Machine
from overlap_spec.config.resolve import resolve
from overlap_spec.hub import resolve_model
from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers import attention, latent
from overlap_spec.models.layers.attention import AttentionShape, PagedAttention, PagedLayer
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.decoder import PreNormLayer, SelfAttention, run_layers
from overlap_spec.models.layers.linear import Linear
from overlap_spec.models.layers.linear_forms import OrderedLinear, in_one_order, linears_of
from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.layers.norm import RMSNorm, WideRMSNorm
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.quantization.linear import QuantizedLinear, StoredWeight
from overlap_spec.worker.build import attention_choices, load_models

BFLOAT = torch.bfloat16


@pytest.mark.parametrize("biased", [False, True])
def test_an_ordered_linear_is_the_linear(biased: bool) -> None:
    weight, x = torch.randn(12, 8).to(BFLOAT), torch.randn(5, 8).to(BFLOAT)
    linear = in_one_order((Linear(weight, torch.randn(12).to(BFLOAT) if biased else None),))[0]
    assert isinstance(linear, OrderedLinear) and linear.stored is weight
    y = F.linear(x, weight, linear.bias)
    close = {"rtol": 2**-5, "atol": 2**-5}
    torch.testing.assert_close(linear(x), y, **close)
    torch.testing.assert_close(linear.logits(x), y.float(), **close)
    torch.testing.assert_close(linear.rows(slice(3, 7))(x), y[:, 3:7], **close)
    torch.testing.assert_close(linear.rows(torch.tensor([5, 2]))(x), y[:, [5, 2]], **close)
    gate, up = y.float().chunk(2, dim=1)
    torch.testing.assert_close(linear.gated(Normed(x, x)).float(), F.silu(gate) * up, rtol=2**-5, atol=2**-5)
    residual, norm = torch.randn(5, 12).to(BFLOAT), Norm(torch.ones(12).to(BFLOAT), 1e-5)
    torch.testing.assert_close(linear.add(x, residual, norm).values, residual + y, **close)
    assert torch.equal(linear.argmax(x), linear.logits(x).argmax(1))
    assert linear.add(x, residual, norm).squares is None, "a sum of squares by blocks of columns has many orders"


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_few_bits_are_ordered(bits: int) -> None:
    """Whatever their order in memory; one that two linears share stays shared."""
    weight, x = torch.randn(64, 128).to(BFLOAT), torch.randn(5, 128).to(BFLOAT)
    stored = StoredWeight.rounded(weight)
    if bits == 4:
        values = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
        stored = StoredWeight(values, torch.rand(1, 64).to(BFLOAT) + 0.5, None, 4, 128)
    for in_fragments in (False, True):
        plain = QuantizedWeight(*stored.in_rows(), BFLOAT)
        linear = QuantizedLinear(plain.in_fragments() if in_fragments else plain)
        first, second = in_one_order((linear, linear))
        assert first is second and isinstance(first.operand, OrderedQuantizedWeight)
        expected = x.float() @ stored.matrix(BFLOAT).float().t()
        torch.testing.assert_close(first.logits(x), expected, rtol=1e-2, atol=0.2)
        assert torch.equal(first.operand.rows(slice(16, 32)).logits(x), first.logits(x)[:, 16:32])
        assert first.num_bytes == linear.num_bytes


def test_other_types_keep_their_linears() -> None:
    linear = Linear(torch.randn(4, 4))
    assert in_one_order((linear,))[0] is linear


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_all_linears_of_the_target_are_ordered(tmp_path: Path, device: str) -> None:
    write_checkpoint(tmp_path, tiny_target(7))
    config = EngineConfig(
        model_path=str(tmp_path), skip_tokenizer_init=True, device=device, dtype="bfloat16",
        speculative_algorithm="NONE", enable_deterministic_inference=device == "cuda",
    )  # fmt: skip
    settings = resolve(config, resolve_model(config), Machine(num_cores=2, has_cuda=True))[0]
    models = load_models(settings, torch.device("cpu"), lambda done, total: None)
    kinds = {isinstance(linear, OrderedLinear) for linear in linears_of(models.target)}
    assert kinds == {device == "cuda"}
    of_target, of_draft = attention_choices(settings.attention)
    assert of_target.in_order == (device == "cuda") and not of_draft.in_order


def hidden(choice: AttentionChoice, family: str) -> Tensor:
    """Of a window of three after a prompt of nine, for two requests."""
    target = load_tiny_target(tiny_target(1, **TINY_FAMILIES[family]))
    paged = Paged(num_requests=2)
    cache = KVCache.allocate(target.kv_shape, paged.num_pages, paged.page_size, torch.float64, CPU)
    model = target.attach(cache, 64, attention=choice)
    tokens = torch.randint(6, VOCAB, (24,), generator=torch.Generator().manual_seed(3))
    model.forward(tokens[:18], paged.rows([9, 9]))
    rows = paged.rows([3, 3])
    return model.forward(tokens[18:], RowBatch(rows.positions, None, rows.page_table, None, 3, True)).hidden


def as_on_gpu(attends: PagedAttention, layer: PagedLayer, heads: Tensor, rows: RowBatch) -> Tensor:
    """In the place of what a CPU's rows take."""
    assert rows.cache_rows is not None
    return attends._attend(layer, attends._written(layer, heads, rows.positions, rows.cache_rows), rows).flatten(1)


def test_sinks_are_of_the_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows with sinks are written, and then attend: one launch does not take them."""
    expected = hidden(DEFAULT_ATTENTION, "gpt oss")
    monkeypatch.setattr(PagedAttention, "_on_cpu", as_on_gpu)
    monkeypatch.setattr(attention, "ordered_windows", None)
    torch.testing.assert_close(hidden(AttentionChoice(in_order=True), "gpt oss"), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [BFLOAT, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["deepseek v3", "deepseek v2 lite"])
def test_products_of_heads_are_ordered(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries times keys and latents times values, of every layer of a model in 16 bits."""
    target, taken = in_one_order(load_tiny_target(tiny_target(1, **TINY_FAMILIES[family]), dtype)), []

    def noted(x: Tensor, weight: Tensor, in_order: bool) -> Tensor:
        if in_order:
            taken.append(weight)
        return head_products(x, weight, in_order)

    for module in (latent, latent_heads):
        monkeypatch.setattr(module, "head_products", noted)
    paged = Paged(num_requests=1)
    cache = KVCache.allocate(target.kv_shape, paged.num_pages, paged.page_size, dtype, CPU)
    found = target.attach(cache, 64, attention=AttentionChoice(in_order=True)).forward(
        torch.arange(6, 12), paged.rows([6])
    )
    assert found.hidden.isfinite().all()
    of_layers = [layer.attention for layer in target.layers]
    weights = [weight for each in of_layers for weight in (each.qkv.key, each.value)]
    assert [id(each) for each in taken] == ([id(each) for each in weights] if dtype == BFLOAT else [])


@pytest.mark.parametrize("family", ["llama", "mistral with a window"])
def test_a_gpu_s_rows_attend_by_parts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's rows take the way of a GPU's here, and the ops their references."""
    expected = hidden(DEFAULT_ATTENTION, family)
    windows: list[object] = []
    at_once: list[object] = []

    def noted(*given: object) -> Tensor:
        windows.append(given[8])
        return ordered_attention(*given)

    def noted_at_once(*given: object) -> Tensor:
        at_once.append(given[8])
        return ordered_windows(*given)

    placed: list[RowBatch] = []
    place = RowBatch.placed

    def place_noted(rows: RowBatch, page_size: int) -> RowBatch:
        placed.append(rows)
        return place(rows, page_size)

    monkeypatch.setattr(PagedAttention, "_on_cpu", as_on_gpu)
    monkeypatch.setattr(attention, "ordered_attention", noted)
    monkeypatch.setattr(attention, "ordered_windows", noted_at_once)
    monkeypatch.setattr(RowBatch, "placed", place_noted)
    found = hidden(AttentionChoice(in_order=True), family)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert windows == at_once == 2 * [None if family == "llama" else 7]
    assert not placed, "windows find their places themselves"
    monkeypatch.setattr(attention, "takes_windows", lambda *given: False)
    torch.testing.assert_close(hidden(AttentionChoice(in_order=True), family), expected, rtol=1e-12, atol=1e-12)
    assert len(windows) == 6 and len(at_once) == 2
    assert len(placed) == 1, "windows are placed once, and not for each layer: on a GPU it is eight launches"


def test_the_setting_is_the_targets_alone() -> None:
    of_target, of_draft = attention_choices(replace(AttentionSettings(), target_in_order=True))
    assert of_target.places_rows and not of_draft.places_rows


class FirstHeads:
    """In the place of attention: the first columns of what the first linear gives."""

    def placed(self, rows: SimpleNamespace) -> SimpleNamespace:
        return rows

    def __call__(self, index: int, qkv: Tensor, rows: SimpleNamespace, read_before_wait: bool) -> Tensor:
        return qkv[:, :128]


@pytest.mark.parametrize(("wide", "biased"), [(False, False), (True, False), (False, True)])
def test_layers_ask_for_one_launch(monkeypatch: pytest.MonkeyPatch, wide: bool, biased: bool) -> None:
    """Where norms or biases are others, linears run one after another."""
    asked: list[tuple[object, ...]] = []

    def record(self: OrderedQuantizedWeight, x: Tensor, residual: Tensor, norm: Norm, *linears: object) -> None:
        asked.append((self, *linears[:2]))

    monkeypatch.setattr(OrderedQuantizedWeight, "add_mlp", record)

    def linear(size_n: int, size_k: int) -> QuantizedLinear:
        plain = QuantizedWeight(*StoredWeight.rounded(torch.randn(size_n, size_k)).in_rows(), BFLOAT)
        bias = torch.zeros(size_n, dtype=BFLOAT) if biased else None
        return QuantizedLinear(OrderedQuantizedWeight.of(plain), bias)

    def norm() -> RMSNorm | WideRMSNorm:
        return WideRMSNorm(torch.ones(128), 1e-5) if wide else RMSNorm(torch.ones(128, dtype=BFLOAT), 1e-5)

    shape = AttentionShape(4, 1, 32, 1.0, None, RopeConfig("default", 1e4, 32, 64, {}))
    layers = [
        PreNormLayer(
            norm(),
            SelfAttention(linear(192, 128), linear(128, 128), shape),
            norm(),
            GatedMLP(linear(512, 128), linear(128, 256)),
        )
        for _ in range(3)
    ]
    rows = SimpleNamespace(read=None)
    rows.read_whole = lambda: rows
    x = torch.randn(2, 128).to(BFLOAT)
    found, _ = run_layers(norm().enter(x), layers, norm(), cast(Any, FirstHeads()), cast(Any, rows))
    assert found.values.isfinite().all() and not torch.equal(found.values, x)
    parts = [(each.attention.output, each.mlp.gate_up, each.mlp.down) for each in layers]
    expected = [] if wide or biased else [tuple(id(part.operand) for part in of_layer) for of_layer in parts]
    assert [tuple(map(id, each)) for each in asked] == expected

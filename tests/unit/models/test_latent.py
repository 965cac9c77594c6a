"""Latent attention: its cache, its absorbed form against heads of their own, its parts; what a config may not have."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from overlap_spec_kernels import Normed
from support.paged_rows import Paged
from support.tiny.families import LATENT, TINY_FAMILIES
from support.tiny.models import CPU, MemorySource, TinyCheckpoint, load_tiny_target, tiny_config, tiny_target
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import RowBatch, TreeKeys
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.decoder import Attend, LayerAttention
from overlap_spec.models.layers.experts import MixtureMLP, SeparateExperts
from overlap_spec.models.layers.latent import LatentAttention, paged_attention_of
from overlap_spec.models.layers.layer_run import KVRun
from overlap_spec.models.layers.linear import Linear
from overlap_spec.models.layers.parallel import Rank
from overlap_spec.models.loading.checkpoint import Checkpoint
from overlap_spec.models.loading.parts import canonical_name
from overlap_spec.models.registry import architecture_of
from overlap_spec.models.targets.latent import LatentConfig, take_attention
from overlap_spec.models.targets.mixture import NAMES, take_mixture

F64 = torch.float64
FAMILY = "deepseek v3"
LENGTH = 29
SIZES = {key: LATENT[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
RANK, WHOLE, TURNED, VALUE = SIZES.values()


def read(family: str = FAMILY, **changes: Any) -> LatentConfig:
    settings = tiny_config(**TINY_FAMILIES[family] | changes)
    config = architecture_of(settings, "config.json").read_config(settings, "config.json")
    assert isinstance(config, LatentConfig)
    return config


def source(checkpoint: TinyCheckpoint, dtype: torch.dtype = F64) -> Checkpoint:
    return Checkpoint(MemorySource(checkpoint.tensors), canonical_name, dtype, CPU, lambda done, total: None)


def attend_of(attention: LatentAttention, rows: RowBatch, paged: Paged) -> tuple[Attend, KVCache]:
    shape = replace(attention.shape)
    cache = KVCache.allocate(KVShape(1, 1, RANK + TURNED, RANK), paged.num_pages, paged.page_size, F64, CPU)
    layers = paged_attention_of([shape], F64, cache, 64, DEFAULT_ATTENTION)
    return LayerAttention(layers, 0, rows, False), cache


def expanded(checkpoint: TinyCheckpoint, config: LatentConfig, x: Tensor) -> Tensor:
    """The attention of layer 0 with keys and values of every head, written out for one sequence from position 0."""
    weights = {
        name.removeprefix("model.layers.0.self_attn.").removesuffix(".weight"): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith("model.layers.0.self_attn.")
    }

    def normed(rows: Tensor, weight: Tensor) -> Tensor:
        return weight * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)

    frequencies, factor = config.decoder.shapes[0].rope.frequencies()
    angles = torch.arange(len(x), dtype=torch.float32)[:, None] * frequencies
    cos, sin = (each.double() for each in (angles.cos() * factor, angles.sin() * factor))

    def turned(pairs: Tensor, row: int) -> Tensor:
        even, odd = pairs[0::2], pairs[1::2]
        return torch.cat((even * cos[row] - odd * sin[row], odd * cos[row] + even * sin[row]))

    queries = normed(x @ weights["q_a_proj"].T, weights["q_a_layernorm"]) @ weights["q_b_proj"].T
    latent, shared = (x @ weights["kv_a_proj_with_mqa"].T).split((RANK, TURNED), dim=1)
    both = (normed(latent, weights["kv_a_layernorm"]) @ weights["kv_b_proj"].T).view(len(x), 4, WHOLE + VALUE)
    rows = []
    for row in range(len(x)):
        heads = []
        for head in range(4):
            query = queries.view(len(x), 4, -1)[row, head]
            query = torch.cat((query[:WHOLE], turned(query[WHOLE:], row)))
            keys = [torch.cat((both[at, head, :WHOLE], turned(shared[at], at))) for at in range(row + 1)]
            products = config.decoder.shapes[0].scale * torch.stack(keys) @ query
            heads.append(products.softmax(0) @ both[: row + 1, head, WHOLE:])
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ weights["o_proj"].T


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_the_absorbed_form_is_attention_of_heads(page_size: int) -> None:
    checkpoint, config = tiny_target(3, **TINY_FAMILIES[FAMILY]), read()
    attention = take_attention(config, source(checkpoint), "layers.0.self_attn")
    x = torch.randn(LENGTH, 32, generator=torch.Generator().manual_seed(1), dtype=F64)
    paged = Paged(num_requests=1, page_size=page_size, pages_each=LENGTH)
    attend, _ = attend_of(attention, paged.rows([LENGTH]), paged)
    found = attention(Normed(x, x), attend)
    torch.testing.assert_close(found, expanded(checkpoint, config, x), atol=1e-12, rtol=0)


def test_a_token_has_one_row_in_a_layer() -> None:
    target = load_tiny_target(tiny_target(3, **TINY_FAMILIES[FAMILY]))
    shape = target.kv_shape
    assert shape == KVShape(2, 1, RANK + TURNED, RANK)
    assert (shape.bytes_per_layer(F64), shape.bytes_per_token(F64)) == (8 * (RANK + TURNED), 2 * 8 * (RANK + TURNED))
    cache = KVCache.allocate(shape, 5, 4, F64, CPU, scratch_rows=3)
    assert len(cache.stacked) == 1 and cache.stacked[0].shape == (2, 6, 4, 1, RANK + TURNED)
    cache.stacked[0].copy_(torch.randn_like(cache.stacked[0]))
    for layer, (k, v) in enumerate(zip(cache.k, cache.v, strict=True)):
        assert torch.equal(k, cache.stacked[0][layer]) and torch.equal(v, k[..., :RANK])
        assert v.data_ptr() == k.data_ptr(), "no copy"


def test_rows_that_overlap_are_moved_once() -> None:
    cache = KVCache.allocate(KVShape(3, 1, 6, 4), 5, 4, F64, CPU)
    cache.stacked[0].copy_(torch.randn_like(cache.stacked[0]))
    before = cache.stacked[0].flatten(1, 2).clone()
    cache.move(torch.tensor([[4, 6, 7], [12, 13, 14]]), torch.tensor([[4, 5, 6], [12, 13, 14]]))
    before[:, [5, 6]] = before[:, [6, 7]]
    assert torch.equal(cache.stacked[0].flatten(1, 2), before)


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}], ids=["latent queries", "queries"])
@pytest.mark.parametrize("is_view", [False, True])
def test_rows_alone_are_written_as_with_queries(changes: dict[str, Any], is_view: bool) -> None:
    """What a draft that catches up writes."""
    target = load_tiny_target(tiny_target(3, **TINY_FAMILIES[FAMILY] | changes))
    layer = target.layers[0]
    attention = layer.attention
    assert isinstance(attention, LatentAttention)
    if not is_view:
        attention = with_other_linears(attention)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(1), dtype=F64)
    caches = []
    for alone in (False, True):
        paged = Paged(num_requests=1)
        rows = paged.rows([9])
        attend, cache = attend_of(attention, rows, paged)
        assert isinstance(attend, LayerAttention)
        if alone:
            KVRun((replace(layer, attention=attention),), attend.attention)(layer.input_norm.enter(x), rows)
        else:
            attention(layer.input_norm.enter(x), attend)
        caches.append(cache.stacked[0])
    torch.testing.assert_close(caches[1], caches[0], atol=1e-12, rtol=0)
    assert caches[0].any()


def test_rows_of_one_level_of_a_tree_have_places_of_their_own() -> None:
    """By the ops that a GPU's kernels are behind, as one operation after another."""
    shape = load_tiny_target(tiny_target(3, **TINY_FAMILIES[FAMILY])).layers[0].attention.shape
    x = torch.randn(8, 5 * shape.head_dim, generator=torch.Generator().manual_seed(1), dtype=F64)
    found = []
    for choice in (DEFAULT_ATTENTION, AttentionChoice(torch_only=True)):
        paged = Paged(num_requests=1)
        cache = KVCache.allocate(KVShape(1, 1, RANK + TURNED, RANK), paged.num_pages, paged.page_size, F64, CPU)
        layers = paged_attention_of([shape], F64, cache, 64, choice)
        layers(0, x[:5].clone(), paged.rows([5]))
        window = paged.rows([3])
        mask = torch.tensor([[[0b001], [0b011], [0b101]]])  # a root and two guesses after it
        positions = torch.tensor([5, 6, 6])
        assert window.cache_rows is not None
        keys = TreeKeys(torch.tensor([5]), window.cache_rows[None], mask, positions[None], 2)
        rows = RowBatch(positions, window.cache_rows, window.page_table, None, 3, True, keys)
        found.append((layers(0, x[5:].clone(), rows), cache.stacked[0]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert (found[0][0][1] - found[0][0][2]).abs().max() > 0.01


def with_other_linears(attention: LatentAttention) -> LatentAttention:
    """Whose rows are not a view."""
    down = attention.qkv.rows.down
    assert isinstance(down, Linear)
    hidden = replace(attention.qkv.rows, down=Opaque(down))
    return replace(attention, qkv=replace(attention.qkv, rows=hidden))


class Opaque:
    """A linear of another kind."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor | Normed) -> Tensor:
        return self._linear(x)


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}], ids=["latent queries", "queries"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_several_ranks_add_up(ranks: int, changes: dict[str, Any]) -> None:
    checkpoint, config = tiny_target(3, **TINY_FAMILIES[FAMILY] | changes), read(**changes)
    x = torch.randn(LENGTH, 32, generator=torch.Generator().manual_seed(1), dtype=F64)

    def part(rank: Rank) -> Tensor:
        attention = take_attention(config, source(checkpoint), "layers.0.self_attn", rank)
        paged = Paged(num_requests=1)
        return attention(Normed(x, x), attend_of(attention, paged.rows([LENGTH]), paged)[0])

    total = sum((part(Rank(rank, ranks)) for rank in range(1, ranks)), part(Rank(0, ranks)))
    torch.testing.assert_close(total, part(Rank()), atol=1e-12, rtol=0)


def test_parts_of_a_mixture_with_a_shared_expert_add_up() -> None:
    checkpoint, config = tiny_target(3, **TINY_FAMILIES[FAMILY]), read()
    x = torch.randn(11, 32, generator=torch.Generator().manual_seed(1), dtype=F64)

    def part(rank: Rank) -> MixtureMLP:
        return take_mixture(source(checkpoint), "layers.1", NAMES, 32, config.experts, rank)

    whole, halves = part(Rank()), [part(Rank(rank, 2)) for rank in range(2)]
    total = halves[0](Normed(x, x)) + halves[1](Normed(x, x))
    torch.testing.assert_close(total, whole(Normed(x, x)), atol=1e-12, rtol=0)
    assert isinstance(whole.experts, SeparateExperts) and whole.shared is not None


def test_heads_that_do_not_divide_are_refused() -> None:
    checkpoint = tiny_target(3, **TINY_FAMILIES[FAMILY])
    with pytest.raises(CheckpointError, match=r"self_attn: found 4 heads, expected a multiple of 3 ranks"):
        take_attention(read(), source(checkpoint), "layers.0.self_attn", Rank(0, 3))


def test_the_correction_of_a_choice_keeps_its_bits() -> None:
    checkpoint = tiny_target(3, **TINY_FAMILIES[FAMILY])
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    fine = 7.0 + 1e-4 * torch.randn(8, generator=torch.Generator().manual_seed(1))
    changed = TinyCheckpoint(checkpoint.config, checkpoint.tensors | {name: fine})
    layer = load_tiny_target(changed, torch.bfloat16).layers[1]
    assert torch.equal(layer.mlp.router.choice.correction, fine)


def test_scales_of_a_cache_of_8_bits_are_those_of_rows() -> None:
    target = load_tiny_target(tiny_target(3, kv_scale=0.25, **TINY_FAMILIES[FAMILY]))
    assert [layer.attention.shape.kv_scales for layer in target.layers] == [(0.25, 0.25)] * 2


def test_work_is_of_the_absorbed_form() -> None:
    target = load_tiny_target(tiny_target(3, **TINY_FAMILIES[FAMILY]))
    attention = target.layers[0].attention
    assert attention.work.pair_flop == 2 * 4 * (RANK + TURNED + RANK)
    linears = (28 + RANK + TURNED) * 32 + 4 * (WHOLE + TURNED) * 28 + 32 * 4 * VALUE
    absorbed = 4 * (WHOLE + VALUE) * RANK
    assert attention.work.row_flop == 2 * (linears + absorbed + 28 + RANK)


def test_groups_count_only_where_the_config_names_them() -> None:
    asked = {"n_group": 4, "topk_group": 2}
    kept = []
    for method in ("greedy", "group_limited_greedy"):
        grouping = read("deepseek v2 lite", topk_method=method, **asked).experts.grouping
        assert grouping is not None
        kept.append((grouping.num_groups, grouping.kept_groups))
    assert kept == [(1, 1), (4, 2)]


def test_layers_are_dense_where_the_config_names_them() -> None:
    assert read(layers=4, first_k_dense_replace=2).sparse == (False, False, True, True)
    assert read(layers=4, first_k_dense_replace=None).sparse == (False, False, False, True)
    assert read("deepseek v2 lite", layers=2, first_k_dense_replace=None).sparse == (True, True)
    flash = {"layers": 3, "first_k_dense_replace": None}
    assert read("glm 4.7 flash", **flash).sparse == (False, True, True)
    kinds = ["sparse", "dense", "sparse"]
    assert read("glm 4.7 flash", **flash, mlp_layer_types=kinds).sparse == (True, False, True)


def test_a_shared_expert_is_as_wide_as_several() -> None:
    assert [read(name).experts.shared_size for name in (FAMILY, "deepseek v2 lite")] == [24, 48]
    assert read(n_shared_experts=None).experts.shared_size == 0


@pytest.mark.parametrize(
    ("key", "size", "most"), [("kv_lora_rank", 520, 512), ("qk_rope_head_dim", 10, 64), ("kv_lora_rank", 20, 512)]
)
def test_rows_that_a_gpu_does_not_take_are_refused_by_key(key: str, size: int, most: int) -> None:
    read().refuse_on_gpu()
    with pytest.raises(CheckpointError, match=f"{key}: found {size}, expected at most {most}, and a multiple of 8, on"):
        read(**{key: size}).refuse_on_gpu()

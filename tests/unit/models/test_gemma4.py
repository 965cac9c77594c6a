"""Gemma 4: its logits against transformers, its files, and what its layers promise."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_spec_kernels import Normed, Routing
from overlap_spec_kernels.launch import assuming
from support.tiny.drawn import TOKENS, loaded, logits_of, random_checkpoint, without_effect
from support.tiny.families import GEMMA4, TINY_FAMILIES
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_config, tiny_target, write_checkpoint
from support.transformers_model import reference_model

from overlap_spec.config import EngineConfig
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub import resolve_model
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.experts import StackedExperts
from overlap_spec.models.layers.gemma4 import DenseAndRouted
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.targets import gemma4
from overlap_spec.models.targets.gemma4 import Gemma4Config

F64 = torch.float64
FAMILIES = ("gemma 4", "gemma 4 e", "gemma 4 moe")
KINDS = ("sliding_attention", "full_attention")


def read(family: str = "gemma 4", **changes: Any) -> Gemma4Config:
    return gemma4.read_config(tiny_config(**TINY_FAMILIES[family] | changes), "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    """Every tensor is random, and the prompt passes the window."""
    checkpoint = random_checkpoint(family)
    assert len(TOKENS) > checkpoint.config["sliding_window"]
    with torch.no_grad():
        expected = reference_model(checkpoint, torch.float32)(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(load_tiny_target(checkpoint, torch.float32)), expected, atol=1e-4, rtol=0)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_counts(family: str) -> None:
    checkpoint = random_checkpoint(family)
    assert not without_effect(checkpoint)


def as_published(checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    """With vision and audio beside it, and with keys and values of layers that do not use them."""
    text = {key: value for key, value in checkpoint.config.items() if key != "architectures"}
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in checkpoint.tensors.items()}
    shared = range(text["num_hidden_layers"] - text["num_kv_shared_layers"], text["num_hidden_layers"])
    unused = [f"layers.{index}.self_attn.{part}.weight" for index in shared for part in ("k_proj", "v_proj", "k_norm")]
    tensors |= {f"model.language_model.{name}": torch.ones(3) for name in unused}
    tensors |= {f"model.{name}.weight": torch.ones(2, 2) for name in ("vision_tower.patches", "embed_audio.linear")}
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {"hidden_size": 768, "num_attention_heads": 5},
        "audio_config": None,
        "image_token_id": 100,
        "eos_token_id": [2, 106],
    }
    return TinyCheckpoint(config, tensors)


@pytest.mark.parametrize("family", ["gemma 4 e", "gemma 4 moe"])
def test_published_files_are_read_and_other_towers_are_skipped(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = random_checkpoint(family)
    with caplog.at_level(logging.INFO):
        found = logits_of(loaded(write_checkpoint(tmp_path, as_published(checkpoint))))
    assert torch.equal(found, logits_of(load_tiny_target(checkpoint, torch.float32)))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "2 tensors of vision and audio are skipped: requests are text"
    ]
    files = resolve_model(EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True))
    assert (files.eos_token_ids, files.context_length, files.vocab_size) == ((2, 106), 512, 128)


def test_other_tensors_are_not_skipped() -> None:
    checkpoint = as_published(random_checkpoint("gemma 4"))
    more = {"model.language_model.layers.0.self_attn.sinks": torch.ones(4)}
    config = random_checkpoint("gemma 4").config
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.language_model\.layers\.0\.self_attn\.sinks"):
        load_tiny_target(TinyCheckpoint(config, checkpoint.tensors | more))


def test_a_token_has_rows_of_its_layers_sizes() -> None:
    """Layers with queries alone have none, and read those of the last layer of their kind."""
    target = load_tiny_target(
        random_checkpoint(
            "gemma 4 e",
            **{**TINY_FAMILIES["gemma 4 e"], "num_hidden_layers": 6}
            | {"layer_types": [*KINDS, KINDS[0], KINDS[0], KINDS[0], KINDS[1]], "num_kv_shared_layers": 2},
        )
    )
    shape = target.kv_shape
    small, large = (2, 16), (2, 24)
    assert shape.sizes == (small, large, small, small) and shape.places == (0, 1, 2, 3, 3, 1)
    assert shape.bytes_per_token(F64) == 2 * 8 * (3 * 32 + 48) and shape.bytes_per_layer(F64) == 2 * 8 * 48
    cache = KVCache.allocate(shape, 5, 4, F64, CPU)
    assert [k.shape[2:] for k in cache.k] == [small, large, small, small, small, large]
    assert sum(part.nbytes for part in cache.stacked) == 20 * shape.bytes_per_token(F64)
    for reader, source in ((4, 3), (5, 1)):
        assert cache.k[reader].data_ptr() == cache.k[source].data_ptr()
        assert cache.v[reader].data_ptr() == cache.v[source].data_ptr()


def test_a_move_takes_the_rows_of_all_layers() -> None:
    cache = KVCache.allocate(load_tiny_target(random_checkpoint("gemma 4 e")).kv_shape, 5, 4, F64, CPU)
    for part in cache.stacked:
        part.copy_(torch.randn_like(part))
    before = [part.flatten(0, 1).clone() for part in (*cache.k, *cache.v)]
    cache.move(torch.tensor([[9, 11]]), torch.tensor([[4, 5]]))
    for part, old in zip((*cache.k, *cache.v), before, strict=True):
        old[[4, 5]] = old[[9, 11]]
        assert torch.equal(part.flatten(0, 1), old)


def test_heads_are_as_they_are_listed() -> None:
    windowed, full = read().decoder.shapes
    assert (windowed.num_kv_heads, windowed.head_dim, windowed.window) == (2, 16, 6)
    assert (full.num_kv_heads, full.head_dim, full.window) == (1, 24, None)
    assert windowed.scale == full.scale == 1.0
    angles, _ = full.rope.frequencies()
    torch.testing.assert_close(angles[:3], 1e6 ** (-torch.arange(0, 6, 2) / 24))
    assert angles[3:].tolist() == [0.0] * 9


def test_sizes_may_be_listed_by_layer() -> None:
    """As transformers 5.17 writes them."""
    own = {"1": {"head_dim": 32, "num_key_value_heads": 4}}
    shapes = read(per_layer_config=own, global_head_dim=None).decoder.shapes
    assert [(shape.num_kv_heads, shape.head_dim) for shape in shapes] == [(2, 16), (4, 32)]


def test_defaults_are_those_of_transformers() -> None:
    left_out = ("global_head_dim", "layer_types", "rope_parameters", "sliding_window", "num_global_key_value_heads")
    config = {key: value for key, value in tiny_config(layers=7, **GEMMA4).items() if key not in left_out}
    found = gemma4.read_config(config, "config.json")
    shapes = found.decoder.shapes
    assert [shape.window for shape in shapes] == [*[512] * 5, None, None]
    assert [shape.head_dim for shape in shapes] == [*[16] * 5, 512, 512]
    assert [(shapes[index].rope.kind, shapes[index].rope.theta) for index in (0, 5)] == [
        ("default", 1e4),
        ("proportional", 1e6),
    ]


def test_logits_are_bounded() -> None:
    checkpoint = random_checkpoint("gemma 4")
    bounded = TinyCheckpoint(checkpoint.config | {"final_logit_softcapping": 0.5}, checkpoint.tensors)
    whole = TinyCheckpoint(checkpoint.config | {"final_logit_softcapping": None}, checkpoint.tensors)
    found, logits = (logits_of(load_tiny_target(each), F64) for each in (bounded, whole))
    torch.testing.assert_close(found, 0.5 * torch.tanh(logits / 0.5))
    head = load_tiny_target(bounded).head
    x = torch.randn(3, 32, dtype=F64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(head.rows(torch.tensor([5, 2])).logits(x), head.logits(x)[:, [5, 2]])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        mixture = load_tiny_target(random_checkpoint("gemma 4 moe"), dtype).layers[1].mlp
        x, y = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        alone = torch.cat([mixture(Normed(*pair)) for pair in zip(x.split(1), y.split(1), strict=True)])
        for num_rows in (2, 3, 31, 64):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(num_rows))[:num_rows]
            assert torch.equal(mixture(Normed(x[order], y[order])), alone[order]), num_rows


def test_experts_are_stacked_on_a_gpu_and_add_up_alike(tmp_path: Path) -> None:
    checkpoint = tiny_target(1, **TINY_FAMILIES["gemma 4 moe"])
    write_checkpoint(tmp_path, checkpoint)
    files = resolve_model(EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True))
    with assuming((9, 0)):
        mlp = load_target(files, torch.bfloat16, torch.device("meta")).layers[0].mlp
    assert isinstance(mlp, DenseAndRouted) and isinstance(mlp.experts, StackedExperts)
    separate = load_tiny_target(checkpoint, torch.float64).layers[0].mlp
    assert isinstance(separate, DenseAndRouted)
    prefix = "model.layers.0.experts"
    stacks = (checkpoint.tensors[f"{prefix}.{part}_proj"].double() for part in ("gate_up", "down"))
    x = torch.randn(5, checkpoint.config["hidden_size"], dtype=torch.float64)
    routing = Routing(torch.tensor([[0, 3], [1, 2], [7, 0], [5, 4], [3, 6]]), torch.rand(5, 2, dtype=torch.float64))
    found = replace(mlp.experts, gate_up=next(stacks), down=next(stacks))(x, routing)
    torch.testing.assert_close(found, separate.experts(x, routing), rtol=1e-12, atol=1e-12)


BAD = {
    "all layers shared": ({"num_kv_shared_layers": 2}, r"num_kv_shared_layers: found 2 of 2 layers, expected that a"),
    "more than all": ({"num_kv_shared_layers": 3}, r"num_kv_shared_layers: found 3 of 2 layers"),
    "no layer of a kind": ({"num_kv_shared_layers": 1}, r"num_kv_shared_layers: found 1 of 2 layers, expected that a"),
    "too few kinds": ({"layer_types": ["full_attention"]}, r"layer_types must be 2 times 'sliding_attention' or"),
    "no such kind": ({"layer_types": ["chunked_attention", "full_attention"]}, r"layer_types must be 2 times"),
    "heads": ({"num_global_key_value_heads": 3}, r"layer 1, 'full_attention': found 3 heads of keys and 24 columns"),
    "columns": (
        {"per_layer_config": {"0": {"head_dim": 15}}},
        r"layer 0, 'sliding_attention': found 2 heads of keys and 15",
    ),
    "rope": ({"rope_parameters": {"rope_theta": 1e4}}, r"rope_parameters must be objects for 'full_attention' and"),
    "activation": ({"hidden_activation": "silu"}, r"hidden_activation 'silu' is not supported"),
    "biases": ({"attention_bias": True}, r"attention_bias True is not supported"),
    "both directions": ({"use_bidirectional_attention": "all"}, r"use_bidirectional_attention 'all' is not supported"),
    "tokens by layer": (
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
        r"vocab_size_per_layer_input: found 64, expected vocab_size 128",
    ),
    "experts": (
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
        r"top_k_experts: found 5, expected at most num_experts 4",
    ),
    "no number of experts": ({"enable_moe_block": True}, r"num_experts must be a positive integer, it is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_configs_are_refused_by_name(case: str) -> None:
    changes, refused = BAD[case]
    with pytest.raises(CheckpointError, match=refused):
        read(**changes)


def test_heads_that_do_not_fit_the_tensors_are_refused() -> None:
    checkpoint = random_checkpoint("gemma 4")
    wide = TinyCheckpoint(checkpoint.config | {"global_head_dim": 32}, checkpoint.tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.\w+\.weight: found shape \[.*\], expected \["):
        load_tiny_target(wide)


def test_values_of_a_config_are_checked(tmp_path: Path) -> None:
    published = as_published(tiny_target(1, **TINY_FAMILIES["gemma 4"]))
    published.config["text_config"]["global_head_dim"] = 25
    write_checkpoint(tmp_path, published)
    with pytest.raises(ConfigError, match=r"global_head_dim must be an even integer from 2 to 4096, found 25"):
        resolve_model(EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True))

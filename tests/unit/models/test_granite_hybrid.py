"""Granite 4: its logits against transformers, what its config and its layers promise, what is refused by name."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_spec_kernels.launch import assuming
from support.paged_rows import Paged
from support.tiny.drawn import TOKENS, loaded, logits_of, random_checkpoint, without_effect
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import TinyCheckpoint, load_tiny_target, tiny_config, tiny_target, write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from overlap_spec.config import EngineConfig
from overlap_spec.config.speculation import keeps_states
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub import resolve_model
from overlap_spec.models.interfaces import RowsRead
from overlap_spec.models.kv_cache import KVShape
from overlap_spec.models.layers.recurrent import Mamba2Shape
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.recurrent_state import StateShape
from overlap_spec.models.targets import granite_hybrid
from overlap_spec.models.targets.granite_hybrid import GraniteConfig

F64 = torch.float64
DENSE, SPARSE = "granite 4", "granite 4 moe"
OF_MAMBA = ("dt_bias", "A_log", ".D", "conv1d.weight", "conv1d.bias", "in_proj.weight", "mamba.norm.weight")


def read(*without: str, **changes: Any) -> GraniteConfig:
    config = tiny_config(**TINY_FAMILIES[DENSE] | changes)
    return granite_hybrid.read_config({k: v for k, v in config.items() if k not in without}, "config.json")


def by_windows(checkpoint: TinyCheckpoint, widths: tuple[int, ...]) -> Tensor:
    """Logits of TOKENS: nine of a prompt, then windows whose rows are all accepted."""
    weights, paged = load_tiny_target(checkpoint), Paged(num_requests=1)
    target = weights.attach(paged.cache(weights.kv_shape, F64, max(widths)), 64)
    found, start = [target.forward(TOKENS[:9], paged.rows([9])).hidden], 9
    for width in widths:
        rows = paged.rows([width], are_final=False)
        found.append(target.forward(TOKENS[start : start + width], rows).hidden)
        start += width
    assert start == len(TOKENS)
    return target.logits(torch.cat(found)).compute()


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "experts, positions": (SPARSE, {}),
    "biases": (DENSE, {"mamba_proj_bias": True, "mamba_conv_bias": False}),
    "multiplied by nothing": (
        DENSE,
        {f"{part}_multiplier": 1.0 for part in ("embedding", "attention", "residual")} | {"logits_scaling": 1.0},
    ),
    "tied": (SPARSE, {"tie_word_embeddings": True, "mamba_n_groups": 4, "mamba_d_conv": 3}),
    "no layer recurs": (DENSE, {"layer_types": ["attention", "attention"]}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_logits_are_those_of_transformers_from_the_same_files(tmp_path: Path, case: str) -> None:
    family, changes = CHANGES[case]
    path = write_checkpoint(tmp_path, random_checkpoint(family, **changes))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(loaded(path)), expected, atol=1e-4, rtol=0)


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("widths", [(1,) * 21, (4, 4, 4, 4, 4, 1), (3, 1, 2, 4, 4, 1, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("family", [DENSE, SPARSE])
def test_windows_give_the_logits_of_a_prompt(family: str, widths: tuple[int, ...]) -> None:
    checkpoint = random_checkpoint(family)
    expected = logits_of(load_tiny_target(checkpoint), F64)
    torch.testing.assert_close(by_windows(checkpoint, widths), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", [DENSE, SPARSE])
def test_what_transformers_saves_is_read(tmp_path: Path, family: str) -> None:
    """It has names of its own for kinds of layers, and one for a step that is not bounded."""
    path = write_checkpoint(tmp_path / "published", random_checkpoint(family))
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(loaded(tmp_path / "saved")), logits_of(loaded(path)))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["experts, positions", "biases"])
def test_every_tensor_counts(case: str) -> None:
    family, changes = CHANGES[case]
    checkpoint = random_checkpoint(family, **changes)
    assert not without_effect(checkpoint)
    names = {part for part in OF_MAMBA if any(name.endswith(part) for name in checkpoint.tensors)}
    assert names == set(OF_MAMBA) - ({"conv1d.bias"} if "mamba_conv_bias" in changes else set())


def test_of_a_last_layer_the_rows_that_are_read() -> None:
    weights = load_tiny_target(random_checkpoint(SPARSE))
    hidden = []
    for index in (None, torch.tensor([4, 8])):
        paged = Paged(num_requests=1)
        target = weights.attach(paged.cache(weights.kv_shape, F64), 64)
        rows = replace(paged.rows([9]), read=None if index is None else RowsRead(index, None))
        hidden.append(target.forward(TOKENS[:9], rows).hidden)
    torch.testing.assert_close(hidden[1], hidden[0][[4, 8]], atol=1e-12, rtol=0)


def test_what_a_config_does_not_say_is_what_transformers_takes() -> None:
    keys = [key for key in TINY_FAMILIES[DENSE] if key.startswith("mamba_") or "multiplier" in key]
    others = ("logits_scaling", "shared_intermediate_size", "position_embedding_type", "head_dim", "rms_norm_eps")
    found = read(*keys, *others, hidden=4096)
    assert found.state == StateShape(1, 8704, 4, 128, 256, 64, num_gates=1)
    assert (found.num_key_heads, found.experts.shared_size, found.rms_norm_eps) == (1, 1024, 1e-6)
    assert (found.of_embedding, found.of_layers, found.of_logits, found.decoder.shapes[0].scale) == (1.0, 1.0, 1.0, 1.0)
    assert (found.conv_bias, found.proj_bias, found.decoder.shapes[0].rope.num_fixed) == (True, False, 512)


def test_the_cache_has_pages_for_the_layers_that_attend() -> None:
    weights = load_tiny_target(random_checkpoint(SPARSE))
    assert weights.kv_shape == KVShape(1, 2, 16, state=StateShape(2, 88, 4, 4, 12, 16, num_gates=1))
    assert [isinstance(layer.attention.shape, Mamba2Shape) for layer in weights.layers] == [True, False, True]
    cache = Paged(num_requests=2).cache(weights.kv_shape, F64, 5)
    assert len(cache.k) == 1 and len(cache.state.layers) == 2
    assert cache.state.layers[0].window.shape == (2, 5, 92)


def test_whether_a_config_has_states() -> None:
    config = tiny_config(**TINY_FAMILIES[DENSE])
    assert keeps_states(config) and keeps_states(config | {"layer_types": ["linear_attention", "full_attention"]})
    for kinds in (["attention"] * 2, ["full_attention"] * 2):
        assert not keeps_states(config | {"layer_types": kinds})
        assert read(layer_types=kinds).state.num_layers == 0


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"mamba_d_head": 8}, r"mamba_d_head: found 4 heads of 8, expected mamba_expand \* hidden_size = 64"),
    "groups": ({"mamba_n_groups": 3}, "mamba_n_heads: found 4, expected a multiple of mamba_n_groups 3"),
    "kernel": ({"mamba_d_conv": 1}, "mamba_d_conv: found 1, expected 2 or more"),
    "size": ({"mamba_d_state": 0}, "mamba_d_state must be a positive integer, found 0"),
    "type": ({"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype: found 'int8', expected one of float32, bfloat16"),
    "kinds": ({"layer_types": ["mamba"]}, "layer_types must be 2 times 'mamba' or 'attention'"),
    "no list": ({"layer_types": "mamba"}, "layer_types must be 2 times 'mamba' or 'attention'"),
    "no attention": ({"layer_types": ["mamba"] * 2}, "layer_types: found no 'attention', expected at least one"),
    "nothing": ({"layer_types": None}, "layer_types: found no 'attention', expected at least one"),
    "steps": ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit \[0.0, 0.1\] is not supported; expected \[0.0, inf\]"),
    "positions": ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
    "experts": ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok: found 3, expected at most"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(case: str) -> None:
    changes, said = BAD_CONFIGS[case]
    with pytest.raises(CheckpointError, match=f"config.json: {said}"):
        read(**changes)


def test_values_that_a_rule_is_about(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, tiny_target(3, **TINY_FAMILIES[DENSE] | {"logits_scaling": -1.0}))
    with pytest.raises(ConfigError, match="logits_scaling must be a positive, finite number, found -1.0"):
        loaded(path)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["attention", "mamba"], "layers.0: found tensors of mamba, expected self_attn: layer_types .* 'attention'"),
        (
            ["mamba", "mamba", "attention"],
            "layers.1: found tensors of self_attn, expected mamba: layer_types .* 'mamba'",
        ),
    ],
)
def test_a_layer_pattern_that_disagrees_with_the_layers(kinds: list[str], said: str) -> None:
    checkpoint = random_checkpoint(DENSE if len(kinds) == 2 else SPARSE)
    with pytest.raises(CheckpointError, match=said):
        load_tiny_target(TinyCheckpoint(checkpoint.config | {"layer_types": kinds}, checkpoint.tensors))


@pytest.mark.parametrize(
    ("changes", "tensor", "shapes"),
    [
        ({"mamba_d_conv": 3}, "mamba.conv1d.weight", r"found shape \[112, 1, 4\], expected \[112, 1, 3\]"),
        ({"mamba_d_state": 4}, "mamba.conv1d.weight", r"found shape \[112, 1, 4\], expected \[80, 1, 4\]"),
        ({"mamba_n_heads": 8}, "mamba.A_log", r"found shape \[4\], expected \[8\]"),
        (
            {"shared_intermediate_size": 40},
            "shared_mlp.input_linear.weight",
            r"found shape \[96, 32\], expected \[80, 32\]",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_tensors(changes: dict[str, int], tensor: str, shapes: str) -> None:
    checkpoint = random_checkpoint(DENSE)
    with pytest.raises(CheckpointError, match=f"layers.0.{tensor}: {shapes}"):
        load_tiny_target(TinyCheckpoint(checkpoint.config | changes, checkpoint.tensors))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"mamba_d_conv": 5}, "mamba_d_conv: found 5, expected at most 4 on a GPU"),
        ({"mamba_d_state": 256}, "mamba_d_state: found 256, expected at most 128 on a GPU"),
    ],
)
def test_sizes_that_a_gpu_has_no_kernel_for(changes: dict[str, int], said: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, tiny_target(3, **TINY_FAMILIES[SPARSE] | changes))
    files = resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True))
    with assuming((9, 0)), pytest.raises(CheckpointError, match=said) if said else nullcontext():
        load_target(files, torch.bfloat16, torch.device("meta"))
    load_target(files, torch.float32, torch.device("cpu"))


def test_experts_in_one_tensor_stay_in_16_bits(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, tiny_target(3, hidden=128, **TINY_FAMILIES[SPARSE]))
    files = resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True, quantization="fp8"))
    with pytest.raises(CheckpointError, match="experts in one tensor are not supported as .* fp8 .*; expected 16-bit"):
        load_target(files, torch.bfloat16, torch.device("cpu"))


def test_a_checkpoint_is_checked_without_values(tmp_path: Path) -> None:
    """Sizes on `meta` are those of the loaded model."""
    path = write_checkpoint(tmp_path, tiny_target(3, **TINY_FAMILIES[SPARSE]))
    files = resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True))
    outline, real = (load_target(files, torch.float32, torch.device(place)) for place in ("meta", "cpu"))
    assert outline.kv_shape == real.kv_shape and outline.num_bytes == real.num_bytes

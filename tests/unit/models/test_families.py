"""What a config means, by architecture."""

from typing import Any

import pytest
import torch
from support.paged_rows import Paged
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, load_tiny_target, tiny_config, tiny_target

from overlap_spec.errors import CheckpointError
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.targets.llama import FAMILIES, AttentionBias, LlamaConfig, family_of

WINDOWED = {"use_sliding_window": True, "sliding_window": 8}


def read(architecture: str, **changes: Any) -> LlamaConfig:
    return LlamaConfig.from_hf(tiny_config(layers=3, architectures=[architecture], **changes), "config.json")


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, (None,) * 3),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 3),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None,) * 3),
        ("Qwen2ForCausalLM", {**WINDOWED, "max_window_layers": 2}, (None, None, 8)),
        ("Qwen2ForCausalLM", WINDOWED, (None,) * 3),  # from layer 28 on
        ("Qwen3ForCausalLM", {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2}, None),
        ("LlamaForCausalLM", {"sliding_window": 8}, None),
        ("Qwen3MoeForCausalLM", {"sliding_window": 8, "max_window_layers": 2}, (None,) * 3),
        ("Qwen3MoeForCausalLM", {**WINDOWED, "max_window_layers": 2}, (8, 8, 8)),
        ("MixtralForCausalLM", {"sliding_window": 8}, (8, 8, 8)),
    ],
)
def test_windows(architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...] | None) -> None:
    if windows is None:
        with pytest.raises(CheckpointError, match="sliding_window 8|layer_types must be 3 times"):
            read(architecture, **changes)
    else:
        assert read(architecture, **changes).windows == windows


@pytest.mark.parametrize(
    ("architecture", "qkv", "output", "mlp"),
    [
        ("LlamaForCausalLM", True, True, True),
        ("MistralForCausalLM", False, False, False),
        ("MiMoForCausalLM", True, False, False),
        ("Qwen2ForCausalLM", True, False, False),
        ("Qwen3ForCausalLM", True, True, False),
    ],
)
def test_biases_where_the_config_asks_for_them_all(architecture: str, qkv: bool, output: bool, mlp: bool) -> None:
    config = read(architecture, attention_bias=True, mlp_bias=True)
    assert (config.attention_bias, config.mlp_bias) == (AttentionBias(qkv, output), mlp)


def test_a_head_dim_that_is_left_out() -> None:
    assert read("LlamaForCausalLM", head_dim=None).head_dim == 8
    assert read("Qwen3ForCausalLM", head_dim=None).head_dim == 128


def test_heads_have_the_layers_of_their_name() -> None:
    assert family_of({"architectures": ["Qwen2ForCausalLMEagle"]}) is FAMILIES["Qwen2ForCausalLM"]
    assert family_of({"architectures": ["LlamaForCausalLMEagle3"]}) is FAMILIES["LlamaForCausalLM"]
    assert family_of({}) is FAMILIES["LlamaForCausalLM"]


@pytest.mark.parametrize(("num_positions", "window"), [(7, None), (8, 7)])
def test_a_window_that_holds_every_position_is_none(num_positions: int, window: int | None) -> None:
    target = load_tiny_target(tiny_target(1, **TINY_FAMILIES["mistral with a window"]))
    paged = Paged(num_requests=1)
    cache = KVCache.allocate(target.kv_shape, paged.num_pages, paged.page_size, torch.float64, CPU)
    assert target.attach(cache, num_positions)._run_layers._attention.windows == (window, window)

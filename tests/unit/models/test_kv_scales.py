"""Scales of cached keys and values: where checkpoints have them, and what is refused."""

from typing import Any

import pytest
import torch
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales
from support.tiny.models import TinyCheckpoint, load_tiny_target, tiny_target

from overlap_spec.errors import CheckpointError

ATTENTION = "model.layers.1.self_attn"


def loaded(tensors: dict[str, Any], **config: Any) -> list[KVScales]:
    """By layer, of a target with these tensors too."""
    checkpoint = tiny_target(1, **config)
    more = {f"{ATTENTION}.{name}": torch.as_tensor(value) for name, value in tensors.items()}
    target = load_tiny_target(TinyCheckpoint(checkpoint.config, checkpoint.tensors | more))
    return [layer.attention.shape.kv_scales for layer in target.layers]


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Olmo2ForCausalLM"])
def test_names(k: str, v: str, architecture: str) -> None:
    scales = loaded({k: 0.5, v: [0.25]}, architectures=[architecture], model_type=architecture[:5].lower())
    assert scales == [NO_SCALES, KVScales(0.5, 0.25)]


def test_one_for_both() -> None:
    assert loaded({"kv_scale": 0.5})[1] == KVScales(0.5, 0.5)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (
            {"k_scale": 0.0, "v_scale": 1.0},
            r"memory: tensor layers\.1\.self_attn\.k_scale: found 0, expected a positive",
        ),
        ({"k_scale": 1.0, "v_scale": -2.0}, r"v_scale: found -2, expected a positive finite number"),
        ({"k_scale": torch.inf, "v_scale": 1.0}, "k_scale: found inf"),
        ({"kv_scale": torch.nan}, "kv_scale: found nan"),
        ({"k_scale": [1.0, 1.0], "v_scale": 1.0}, r"k_scale: found shape \[2\], expected \[\]"),
        ({"k_scale": 1.0}, r"k_scale has no counterpart: expected layers\.1\.self_attn\.v_scale"),
        ({"k_scale": 1.0, "v_scale": 1.0, "k_proj.k_scale": 1.0}, "unexpected tensor"),
    ],
)
def test_what_is_refused(tensors: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        loaded(tensors)

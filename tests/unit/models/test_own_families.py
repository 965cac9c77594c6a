"""Architectures that are not Llama with switches: what their configs mean, what is refused by name, their layers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from overlap_spec_kernels import Grouping
from overlap_spec_kernels.experts.best_of_groups import sigmoid_scores
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, load_tiny_target, tiny_config, tiny_target, write_checkpoint

from overlap_spec.config import ModelFiles
from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.norm import WideRMSNorm
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.loader import load_mtp, load_target
from overlap_spec.models.loading.parts import rotated_first
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.registry import architecture_of
from overlap_spec.models.targets.mixture import MixtureConfig
from overlap_spec.models.targets.reading import ConfigReader, DecoderConfig

GEMMA, OLMO, PHI = "gemma 3", "olmo 2", "phi 3"
OPTIONAL = (
    *("attention_bias", "use_qk_norm", "partial_rotary_factor", "first_k_dense_replace", "norm_topk_prob", "n_group"),
    *("topk_group", "n_shared_experts", "routed_scaling_factor", "num_nextn_predict_layers"),
)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported; expected 'gelu_pytorch_tanh'"),
    (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
    (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    (GEMMA, {"attention_bias": True}, "attention_bias True is not supported; expected False"),
    (GEMMA, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive integer, found 0"),
    (GEMMA, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must be objects for 'full_attention' and"),
    (GEMMA, {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
    (GEMMA, {"layer_types": ["full_attention"]}, "layer_types must be 2 times"),
    (OLMO, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; expected 'silu'"),
    (OLMO, {"attention_bias": True}, "attention_bias True is not supported"),
    (OLMO, {"sliding_window": 8}, "sliding_window 8 is not supported"),
    (PHI, {"rope_scaling": {"type": "longrope"}}, "rope_scaling of type 'longrope' is not supported"),
    (PHI, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters of type 'yarn' is not supported"),
    (PHI, {"partial_rotary_factor": 0.2}, "partial_rotary_factor rotates 3 of 16: expected pairs"),
    (PHI, {"sliding_window": 0}, "sliding_window must be null or a positive integer, found 0"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotary position .* over part of a head"),
]


def read(family: str, **changes: Any) -> DecoderConfig:
    config = tiny_config(**(TINY_FAMILIES[family] | changes))
    found = architecture_of(config, "config.json").read_config(config, "config.json")
    assert isinstance(found, DecoderConfig)
    return found


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_its_key(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        read(family, **changes)


def test_gemmas_layers_take_turns() -> None:
    config = read(GEMMA, layers=7, sliding_window_pattern=None, query_pre_attn_scalar=64, max_position_embeddings=9)
    assert [shape.window for shape in config.shapes] == [6] * 5 + [None, 6]
    assert {shape.scale for shape in config.shapes} == {0.125}
    assert [shape.rope.theta for shape in config.shapes] == [1e4] * 5 + [1e6, 1e4]
    assert read(GEMMA, tie_word_embeddings=None).tie_word_embeddings, "as its checkpoints leave it out"
    assert not read(OLMO, tie_word_embeddings=None).tie_word_embeddings


def test_gemmas_norms_are_rounded_once() -> None:
    x, weight = torch.randn(3, 32).bfloat16(), 1 + 0.3 * torch.randn(32)
    wide = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6) * weight
    assert torch.equal(WideRMSNorm(weight, 1e-6)(x), wide.bfloat16())
    target = load_tiny_target(tiny_target(1, **TINY_FAMILIES[GEMMA]), torch.bfloat16)
    assert isinstance(target.norm, WideRMSNorm) and target.norm.weight.dtype == torch.float32
    assert target.embedding.scale == float(torch.tensor(32**0.5).bfloat16())


def test_pairs_that_are_not_rotated_have_angle_zero() -> None:
    rope = RopeConfig("default", 1e4, 4, 16, {}, num_fixed=2)
    cos, sin = rope.table(5, torch.float32, CPU).chunk(2, dim=1)
    assert cos.shape == (5, 4) and bool((cos[:, 2:] == 1).all()) and bool((sin[:, 2:] == 0).all())
    assert torch.equal(cos[:, :2], RopeConfig("default", 1e4, 4, 16, {}).table(5, torch.float32, CPU)[:, :2])


@pytest.mark.parametrize("family", [GEMMA, OLMO, PHI])
def test_gguf_and_mtp_layers_are_refused(family: str, tmp_path: Path) -> None:
    checkpoint = tiny_target(1, **TINY_FAMILIES[family])
    (tmp_path / "tiny.gguf").touch()
    files = ModelFiles(
        weights=str(tmp_path / "tiny.gguf"),
        config=checkpoint.config,
        tokenizer_dir=None,
        eos_token_ids=(),
        context_length=512,
        vocab_size=128,
    )
    refused = "not a readable GGUF file" if family == GEMMA else "a GGUF file of .*ForCausalLM is not supported"
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: {refused}"):
        load_target(files, torch.float32, CPU)
    write_checkpoint(tmp_path, checkpoint)
    source = DraftSource(str(tmp_path), torch.float64, CPU, load_format="dummy")
    with pytest.raises(CheckpointError, match=r"an MTP layer of .*ForCausalLM is not supported"):
        load_mtp(source, load_tiny_target(checkpoint))


def test_a_rotated_part_of_a_head_is_put_into_both_halves() -> None:
    rope = SimpleNamespace(head_dim=4, num_fixed=2)
    shape = SimpleNamespace(head_dim=8, num_heads=1, num_kv_heads=1, rope=rope)
    order = [0, 1, 4, 5, 2, 3, 6, 7]  # of queries and keys; values stay
    expected = [*order, *(8 + row for row in order), *range(16, 24)]
    found = rotated_first(shape)
    assert found is not None and found.tolist() == expected


def test_what_a_glm_does_not_say() -> None:
    """Half of each head is rotated, one layer is dense, there are no biases and no norms of heads."""
    silent = {key: value for key, value in TINY_FAMILIES["glm 4.5"].items() if key not in OPTIONAL}
    settings = tiny_config(layers=3, **silent)
    config = architecture_of(settings, "config.json").read_config(settings, "config.json")
    assert isinstance(config, MixtureConfig)
    llama, experts = config.decoder, config.experts
    assert config.sparse == (False, True, True)
    assert (llama.rope.head_dim, llama.rope.num_fixed, llama.head_dim) == (8, 4, 16)
    assert not (llama.head_norms or llama.attention_bias.qkv or llama.attention_bias.output or llama.brings_draft)
    assert (experts.normalised, experts.shared_size, experts.grouping) == (
        True,
        0,
        Grouping(sigmoid_scores, rated_by=2),
    )


def test_without_a_number_of_key_heads_there_are_as_many_as_queries() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    assert ConfigReader(sizes, "config.json").heads() == (4, 4, 16)
    assert ConfigReader({**sizes, "num_key_value_heads": 2}, "config.json").heads() == (4, 2, 16)

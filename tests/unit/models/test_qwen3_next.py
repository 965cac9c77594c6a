"""Qwen3-Next: its logits against transformers, what its config and its layers promise, what is refused by name."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from overlap_spec_kernels.launch import assuming
from support.paged_rows import Paged
from support.tiny.drawn import TOKENS, loaded, logits_of, random_checkpoint, without_effect
from support.tiny.families import DELTA, TINY_FAMILIES
from support.tiny.layouts import fused_experts
from support.tiny.models import TinyCheckpoint, load_tiny_target, tiny_config, tiny_target, write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from overlap_spec.config import EngineConfig
from overlap_spec.errors import CheckpointError
from overlap_spec.hub import resolve_model
from overlap_spec.models.drafts.language_draft import load_language_draft
from overlap_spec.models.interfaces import RowBatch, StateRows
from overlap_spec.models.kv_cache import KVShape
from overlap_spec.models.layers.recurrent import RecurrentLayer
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.recurrent_state import StateShape
from overlap_spec.models.targets import qwen3_next
from overlap_spec.models.targets.hybrid import HybridConfig
from overlap_spec.speculative.rows import concatenated

F64 = torch.float64
FAMILY = "qwen3 next"
OF_DELTA = ("dt_bias", "A_log", "conv1d.weight", "in_proj_ba.weight", "linear_attn.norm.weight")


def read(*without: str, **changes: Any) -> HybridConfig:
    config = tiny_config(**TINY_FAMILIES[FAMILY] | changes)
    return qwen3_next.read_config({k: v for k, v in config.items() if k not in without}, "config.json")


def by_windows(checkpoint: TinyCheckpoint, widths: tuple[int, ...], dtype: torch.dtype = F64) -> Tensor:
    """Logits of TOKENS: nine of a prompt, then windows whose rows are all accepted."""
    weights, paged = load_tiny_target(checkpoint, dtype), Paged(num_requests=1)
    target = weights.attach(paged.cache(weights.kv_shape, dtype, max(widths)), 64)
    found, start = [target.forward(TOKENS[:9], paged.rows([9])).hidden], 9
    for width in widths:
        rows = paged.rows([width], are_final=False)
        found.append(target.forward(TOKENS[start : start + width], rows).hidden)
        start += width
    assert start == len(TOKENS)
    return target.logits(torch.cat(found)).compute()


@pytest.mark.parametrize("dense", [False, True], ids=["experts", "dense first layer"])
def test_logits_are_those_of_transformers_from_the_same_files(tmp_path: Path, dense: bool) -> None:
    """Three layers that recur and one that attends."""
    changes = {"mlp_only_layers": [0]} if dense else {}
    checkpoint = random_checkpoint(FAMILY, layers=4, full_attention_interval=4, **changes)
    path = write_checkpoint(tmp_path, checkpoint)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(loaded(path)), expected, atol=1e-4, rtol=0)


def test_a_model_without_experts(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(FAMILY, num_experts=0, rope_theta=1e6, tie_word_embeddings=True)
    path = write_checkpoint(tmp_path, checkpoint)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(loaded(path)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("widths", [(1,) * 21, (4, 4, 4, 4, 4, 1), (3, 1, 2, 4, 4, 1, 1, 3, 2)], ids=str)
def test_windows_give_the_logits_of_a_prompt(widths: tuple[int, ...]) -> None:
    checkpoint = random_checkpoint(FAMILY)
    expected = logits_of(load_tiny_target(checkpoint), F64)
    torch.testing.assert_close(by_windows(checkpoint, widths), expected, atol=1e-10, rtol=0)


def test_windows_and_prompts_in_one_forward() -> None:
    """Two rows of a request that decodes, and the whole of another's prompt: as one after the other."""
    weights, outputs = load_tiny_target(random_checkpoint(FAMILY, layers=4)), []
    for together in (False, True):
        paged = Paged(num_requests=2)
        target = weights.attach(paged.cache(weights.kv_shape, F64, 2), 64)
        target.forward(TOKENS[:9], paged.rows([9, 0]))
        window, prompt = of_one(paged, 0, 2, are_final=False), of_one(paged, 1, 7, are_final=True)
        tokens = TOKENS[9:11], TOKENS[:7]
        if together:
            outputs.append(target.forward(torch.cat(tokens), concatenated(window, prompt)).hidden)
        else:
            alone = [target.forward(*each).hidden for each in zip(tokens, (window, prompt), strict=True)]
            outputs.append(torch.cat(alone))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-11, rtol=0)


def of_one(paged: Paged, request: int, count: int, are_final: bool) -> RowBatch:
    """The next rows of one request, in a batch of its own."""
    counts = [0, 0]
    counts[request] = count
    rows = paged.rows(counts)
    return replace(
        rows,
        page_table=rows.page_table[request : request + 1],
        row_starts=torch.tensor([0, count], dtype=torch.int32),
        uniform=not are_final,
        state=StateRows(torch.tensor([request]), are_final),
    )


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "published", random_checkpoint(FAMILY))
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(loaded(tmp_path / "saved")), logits_of(loaded(path)))


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["published", "fused"])
def test_every_tensor_counts(fused: bool) -> None:
    checkpoint = random_checkpoint(FAMILY)
    checkpoint = replace(checkpoint, tensors=fused_experts(checkpoint.tensors)) if fused else checkpoint
    names = [name for name in checkpoint.tensors if not re.search(r"experts\.[1-9]", name)]
    assert not without_effect(checkpoint, names)
    assert all(any(name.endswith(part) for name in checkpoint.tensors) for part in OF_DELTA)


def test_what_a_config_does_not_say_is_what_transformers_takes() -> None:
    """The sizes of the published 80B-A3B, whose layers that attend are every fourth."""
    found = read(*DELTA, "full_attention_interval", "partial_rotary_factor", "head_dim", "rms_norm_eps", layers=8)
    assert found.attends == (False, False, False, True) * 2
    assert found.state == StateShape(6, 8192, 4, 32, 128, 128) and found.num_key_heads == 16
    shape = found.decoder.shapes[0]
    assert (shape.head_dim, shape.rope.head_dim, shape.rope.num_fixed) == (256, 64, 96)
    assert found.rms_norm_eps == 1e-6 and found.sparse == (True,) * 8 and found.experts.normalised


def test_layers_by_name_and_by_interval() -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    assert read("full_attention_interval", layers=3, layer_types=kinds).attends == (True, False, False)
    assert read(layers=3, layer_types=kinds[::-1], full_attention_interval=3).attends == (False, False, True)


def test_the_type_of_states_is_the_configs() -> None:
    assert read().state.state_dtype(torch.bfloat16) == torch.float32
    assert read().state.state_dtype(F64) == F64
    assert read(mamba_ssm_dtype="bfloat16").state.state_dtype(torch.float32) == torch.bfloat16


def test_a_state_in_few_bits_is_rounded() -> None:
    checkpoint = random_checkpoint(FAMILY)
    rounded = TinyCheckpoint(checkpoint.config | {"mamba_ssm_dtype": "bfloat16"}, checkpoint.tensors)
    whole, found = by_windows(checkpoint, (1,) * 21), by_windows(rounded, (1,) * 21)
    assert 1e-5 < float((found - whole).abs().max()) < 0.3


def test_the_cache_has_pages_for_the_layers_that_attend() -> None:
    weights = load_tiny_target(random_checkpoint(FAMILY, layers=6))
    assert weights.kv_shape == KVShape(3, 2, 16, state=StateShape(3, 80, 4, 4, 8, 12))
    assert [isinstance(layer.attention, RecurrentLayer) for layer in weights.layers] == [True, False] * 3
    cache = Paged(num_requests=2).cache(weights.kv_shape, F64, 5)
    assert len(cache.k) == len(cache.state.layers) == 3
    assert cache.state.layers[0].window.shape == (2, 5, 88)


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"linear_num_value_heads": 3}, "linear_num_value_heads: found 3, expected a multiple of .* 2"),
    "kernel": ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: found 1, expected 2 or more"),
    "size": ({"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive integer, found 0"),
    "type": ({"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype: found 'int8', expected one of float32, bfloat16"),
    "kinds": ({"layer_types": ["linear_attention"]}, "layer_types must be 2 times 'linear_attention' or"),
    "pattern": (
        {"layer_types": ["full_attention", "linear_attention"]},
        "layer_types: found 'full_attention' for layer 0, expected that 'full_attention' is every layer of .* 2",
    ),
    "no attention": ({"full_attention_interval": 3}, "layer_types: found no 'full_attention', expected at least one"),
    "top k": ({"num_experts_per_tok": 9}, "num_experts_per_tok: found 9, expected at most num_experts 8"),
    "rope": ({"partial_rotary_factor": 0.2}, "partial_rotary_factor rotates 3 of 16: expected pairs"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs(case: str) -> None:
    changes, said = BAD_CONFIGS[case]
    with pytest.raises(CheckpointError, match=f"config.json: {said}"):
        read(**changes)


def test_a_layer_pattern_that_disagrees_with_the_layers() -> None:
    checkpoint = random_checkpoint(FAMILY)
    config = {key: value for key, value in checkpoint.config.items() if key != "full_attention_interval"}
    other = {"layer_types": ["full_attention", "linear_attention"]}
    with pytest.raises(CheckpointError, match="layers.0: found tensors of linear_attn, expected self_attn:"):
        load_tiny_target(TinyCheckpoint(config | other, checkpoint.tensors))


@pytest.mark.parametrize(
    ("changes", "tensor", "shapes"),
    [
        ({"linear_conv_kernel_dim": 3}, "conv1d.weight", r"found shape \[80, 1, 4\], expected \[80, 1, 3\]"),
        ({"linear_key_head_dim": 4}, "in_proj_qkvz.weight", r"found shape \[128, 32\], expected \[112, 32\]"),
        ({"linear_num_key_heads": 4}, "in_proj_qkvz.weight", r"found shape \[128, 32\], expected \[160, 32\]"),
    ],
)
def test_sizes_that_do_not_fit_the_tensors(changes: dict[str, int], tensor: str, shapes: str) -> None:
    checkpoint = random_checkpoint(FAMILY)
    with pytest.raises(CheckpointError, match=f"layers.0.linear_attn.{tensor}: {shapes}"):
        load_tiny_target(TinyCheckpoint(checkpoint.config | changes, checkpoint.tensors))


def test_layers_that_draft_are_left_to_their_own_loader() -> None:
    checkpoint = random_checkpoint(FAMILY)
    more = {f"mtp.{name}": torch.zeros(1) for name in ("fc.weight", "layers.0.mlp.gate.weight", "norm.weight")}
    both = TinyCheckpoint(checkpoint.config, checkpoint.tensors | more)
    assert torch.equal(logits_of(load_tiny_target(both), F64), logits_of(load_tiny_target(checkpoint), F64))


def test_it_drafts_for_no_other_target(tmp_path: Path) -> None:
    checkpoint = tiny_target(3, **TINY_FAMILIES[FAMILY])
    source = DraftSource.for_target(str(write_checkpoint(tmp_path, checkpoint)), load_tiny_target(checkpoint))
    with pytest.raises(CheckpointError, match="a model with a recurrent state cannot draft yet"):
        load_language_draft(source, load_tiny_target(checkpoint))


@pytest.mark.parametrize("kernel", [4, 5])
def test_a_long_convolution_is_refused_on_a_gpu(kernel: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, tiny_target(3, **TINY_FAMILIES[FAMILY] | {"linear_conv_kernel_dim": kernel}))
    files = resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True))
    said = r"config\.json: linear_conv_kernel_dim: found 5, expected at most 4 on a GPU; use --device cpu"
    with assuming((9, 0)), pytest.raises(CheckpointError, match=said) if kernel > 4 else nullcontext():
        load_target(files, torch.bfloat16, torch.device("meta"))
    load_target(files, torch.float32, torch.device("cpu"))


def test_a_checkpoint_is_checked_without_values(tmp_path: Path) -> None:
    """Sizes on `meta` are those of the loaded model."""
    path = write_checkpoint(tmp_path, tiny_target(3, **TINY_FAMILIES[FAMILY]))
    files = resolve_model(EngineConfig(model_path=str(path), skip_tokenizer_init=True))
    outline, real = (load_target(files, torch.float32, torch.device(place)) for place in ("meta", "cpu"))
    assert outline.kv_shape == real.kv_shape and outline.num_bytes == real.num_bytes
    assert msgspec.to_builtins(files)["config"]["linear_num_value_heads"] == 4

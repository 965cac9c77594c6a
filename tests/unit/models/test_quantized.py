"""Checkpoints in 8 and 4 bits: what is loaded is what their tensors mean; what is wrong is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged_rows import Paged
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_target, write_checkpoint
from support.tiny.quantized import FORMATS, quantised
from torch import Tensor

from overlap_spec.config import DUMMY, ModelFiles
from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.quantization import forms
from overlap_spec.models.quantization.linear import QuantizedLinear
from overlap_spec.models.quantization.stored import StoredWeight

F64 = torch.float64
SIZES: dict[str, Any] = {"hidden": 128, "intermediate_size": 256, "head_dim": 32}
Q_PROJ = "model.layers.0.self_attn.q_proj"
TOKENS = torch.arange(3, 20)


def load(directory: Path, dtype: torch.dtype = F64, **changes: Any) -> LoadedTarget:
    config = json.loads((directory / "config.json").read_text())
    files = ModelFiles(
        weights=str(directory),
        config=config,
        tokenizer_dir=None,
        eos_token_ids=(2,),
        context_length=512,
        vocab_size=128,
    )
    return load_target(replace_struct(files, **changes), dtype, CPU)


def replace_struct(files: ModelFiles, **changes: Any) -> ModelFiles:
    from msgspec.structs import replace as changed

    return changed(files, **changes)


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears stay in their format, as on a GPU with kernels for it, and the twins multiply."""
    monkeypatch.setattr(StoredWeight, "runs_on", lambda self, device, dtype: True)


def logits_of(weights: LoadedTarget) -> Tensor:
    paged = Paged(num_requests=1)
    cache = KVCache.allocate(weights.kv_shape, paged.num_pages, paged.page_size, F64, CPU)
    target = weights.attach(cache, 64)
    return target.logits(target.forward(TOKENS, paged.rows([len(TOKENS)])).hidden).compute()


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("kind", FORMATS)
def test_it_computes_what_its_tensors_mean(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, meant = quantised(tiny_target(3, **SIZES), kind)
    write_checkpoint(tmp_path, stored)
    expected = logits_of(load_tiny_target(meant))
    torch.testing.assert_close(logits_of(load(tmp_path)), expected, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(StoredWeight, "runs_on", lambda self, device, dtype: True)
    kept = load(tmp_path)
    assert isinstance(kept.layers[0].attention.output, QuantizedLinear)
    assert not isinstance(kept.head, QuantizedLinear)
    torch.testing.assert_close(logits_of(kept), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8 by row", "awq", "int4"])
def test_it_computes_what_transformers_does_with_the_dequantised_weights(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    stored, meant = quantised(tiny_target(3, **SIZES), kind)
    write_checkpoint(tmp_path, stored)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**meant.config, attn_implementation="eager"))
    reference.to(F64).load_state_dict(meant.tensors)
    with torch.no_grad():
        expected = reference(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(load(tmp_path)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "phi 3 in part", "gemma 3"])
def test_families(family: str, tmp_path: Path, keeping: None) -> None:
    stored, meant = quantised(tiny_target(3, **SIZES, **TINY_FAMILIES[family]), "fp8 by row")
    write_checkpoint(tmp_path, stored)
    torch.testing.assert_close(logits_of(load(tmp_path)), logits_of(load_tiny_target(meant)), rtol=1e-9, atol=1e-9)


def test_linears_that_are_ignored_stay(tmp_path: Path, keeping: None) -> None:
    stored, meant = quantised(tiny_target(3, **SIZES), "int4", kept=("down_proj",))
    write_checkpoint(tmp_path, stored)
    found = load(tmp_path)
    layer = found.layers[0]
    assert not isinstance(layer.mlp.down, QuantizedLinear) and isinstance(layer.mlp.gate_up, QuantizedLinear)
    torch.testing.assert_close(logits_of(found), logits_of(load_tiny_target(meant)), rtol=1e-9, atol=1e-9)


def test_a_head_in_8_bits_if_it_is_stored_so(tmp_path: Path, keeping: None) -> None:
    stored, _ = quantised(tiny_target(3, **SIZES), "fp8 by row")
    head = stored.tensors["lm_head.weight"]
    tensors = stored.tensors | {
        "lm_head.weight": (head * 16).float().to(torch.float8_e4m3fn),
        "lm_head.weight_scale": torch.full((len(head), 1), 1 / 16),
    }
    config = stored.config["quantization_config"] | {"ignore": []}
    write_checkpoint(tmp_path, TinyCheckpoint(stored.config | {"quantization_config": config}, tensors))
    found = load(tmp_path).head
    assert isinstance(found, QuantizedLinear)
    x = torch.randn(2, 128, dtype=F64)
    torch.testing.assert_close(found.logits(x), x @ tensors["lm_head.weight"].double().t() / 16)


def test_16_bit_weights_are_rounded_while_loading(tmp_path: Path, keeping: None) -> None:
    checkpoint = tiny_target(3, **SIZES)
    write_checkpoint(tmp_path, checkpoint)
    plain, rounded = load(tmp_path), load(tmp_path, quantization="fp8")
    assert isinstance(rounded.layers[0].mlp.down, QuantizedLinear) and rounded.head.stored.dtype == F64
    exact = logits_of(plain)
    error = float((logits_of(rounded) - exact).norm() / exact.norm())
    assert 1e-3 < error < 0.1
    assert rounded.num_bytes < plain.num_bytes


def test_random_weights_have_the_format_of_the_config(tmp_path: Path, keeping: None) -> None:
    for kind in FORMATS:
        stored, _ = quantised(tiny_target(3, **SIZES), kind)
        write_checkpoint(tmp_path, stored)
        found = load(tmp_path, load_format=DUMMY)
        assert isinstance(found.layers[0].mlp.gate_up, QuantizedLinear)
        deviation = float(found.layers[0].mlp.gate_up(torch.eye(128, dtype=F64)).std())
        assert 0.015 < deviation < 0.03, kind
        assert logits_of(found).isfinite().all()


def test_without_a_kernel_it_becomes_a_matrix(tmp_path: Path) -> None:
    stored = StoredWeight.rounded(torch.randn(8, 128))
    on_cpu = forms.LinearForms(torch.bfloat16, CPU)
    assert not on_cpu.keeps(stored) and (on_cpu.kept, on_cpu.dequantised) == (0, 1)


@pytest.mark.parametrize("kind", ["fp8 by block", "awq", "int4 with zero points"])
def test_headers_alone_tell_types_and_sizes(kind: str, tmp_path: Path) -> None:
    """What `overlap-spec check` reads: nothing has values."""
    stored, _ = quantised(tiny_target(3, **SIZES), kind)
    write_checkpoint(tmp_path, stored)
    config = json.loads((tmp_path / "config.json").read_text())
    files = ModelFiles(
        weights=str(tmp_path), config=config, tokenizer_dir=None, eos_token_ids=(), context_length=8, vocab_size=128
    )
    meta = torch.device("meta")
    in_16_bits, in_32 = (load_target(files, dtype, meta) for dtype in (torch.bfloat16, torch.float32))
    assert isinstance(in_16_bits.layers[0].mlp.down, QuantizedLinear)
    assert not isinstance(in_32.layers[0].mlp.down, QuantizedLinear)
    assert in_16_bits.layers[0].mlp.down.num_bytes < in_32.layers[0].mlp.down.num_bytes / 3


Spoil = Callable[[dict[str, Tensor]], object]


def put(end: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q_PROJ}.{end}"] = change(tensors[f"{Q_PROJ}.{end}"])

    return spoil


def first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return change


WRONG: dict[str, tuple[str, Spoil, str]] = {
    "no scale": (
        "fp8 by row",
        lambda tensors: tensors.pop(f"{Q_PROJ}.weight_scale"),
        r"q_proj\.weight_scale is missing, expected shape \[128, 1\]",
    ),
    "scale of another shape": (
        "fp8 by row",
        put("weight_scale", lambda scale: scale[:7]),
        r"q_proj\.weight_scale: found shape \[7, 1\], expected \[128, 1\]",
    ),
    "zero scale": ("fp8 by row", put("weight_scale", first(0)), "found 1 scales like 0, expected positive, finite"),
    "infinite scale": ("int4", put("weight_scale", first(float("inf"))), "found 1 scales like inf"),
    "NaN": ("fp8 by row", put("weight", lambda weight: (weight.float() * float("nan")).to(weight.dtype)), "found NaN"),
    "16 bits where 8 are named": (
        "fp8 by row",
        put("weight", lambda weight: weight.bfloat16()),
        r"q_proj\.weight: found type bfloat16, expected float8_e4m3fn: the config names fp8",
    ),
    "16 bits where 4 are named": (
        "awq",
        lambda tensors: tensors.update({f"{Q_PROJ}.weight": torch.zeros(128, 128), f"{Q_PROJ}.qweight": None}),
        r"q_proj\.qweight is missing, expected shape \[128, 16\]",
    ),
    "words of another shape": (
        "gptq",
        put("qweight", lambda words: words[:3]),
        r"q_proj\.qweight: found shape \[3, 128\], expected \[16, 128\]",
    ),
    "act-order": ("gptq", put("g_idx", lambda index: index.flip(0)), "found columns in another order"),
    "zero point of 16": ("gptq", put("qzeros", lambda zeros: zeros * 0 - 1), "found a zero point of 16"),
    "another shape within": ("int4", put("weight_shape", lambda shape: shape + 1), r"found \[129, 129\]"),
    "one part of three": (
        "fp8 by row",
        lambda tensors: None,
        "q_proj stays in 16 bits and .*k_proj does not",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    kind, spoil, message = WRONG[case]
    stored, _ = quantised(tiny_target(3, **SIZES), kind)
    spoil(stored.tensors)
    if case == "one part of three":
        stored.config["quantization_config"] = stored.config["quantization_config"] | {"ignore": ["re:.*q_proj"]}
    tensors = {name: tensor for name, tensor in stored.tensors.items() if tensor is not None}
    write_checkpoint(tmp_path, replace(stored, tensors=tensors))
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value), "the file is named"


def test_a_format_that_the_config_does_not_name(tmp_path: Path) -> None:
    stored, _ = quantised(tiny_target(3, **SIZES), "fp8 by row")
    del stored.config["quantization_config"]
    write_checkpoint(tmp_path, stored)
    with pytest.raises(CheckpointError, match="found type float8_e4m3fn, expected one of .*names no format of weights"):
        load(tmp_path)

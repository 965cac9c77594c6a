"""Checkpoints in 8 and 4 bits: what is loaded is what their tensors mean; what is wrong is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_spec_kernels.launch import assuming
from support.bad_checkpoints import FORMAT_ERRORS, badly_quantised
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
from overlap_spec.models.quantization import linear
from overlap_spec.models.quantization.linear import QuantizedLinear, StoredWeight, stacked

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
    """Linears stay in their format, as on a GPU with kernels for it, and the references multiply."""
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
    transformers = pytest.importorskip("transformers", reason="it is compared with: pip install --group test")
    stored, meant = quantised(tiny_target(3, **SIZES), kind)
    write_checkpoint(tmp_path, stored)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**meant.config, attn_implementation="eager"))
    reference.to(F64).load_state_dict(meant.tensors)
    with torch.no_grad():
        expected = reference(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits_of(load(tmp_path)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "fp8 by row") for family in ("qwen2", "phi 3 in part", "gemma 3", "qwen3 moe", "mixtral")),
        *(("glm 4.5", kind) for kind in ("fp8 by row", "fp8 by block", "awq")),
    ],
)
def test_families(family: str, kind: str, tmp_path: Path, keeping: None) -> None:
    sizes = SIZES | {"moe_intermediate_size": 64 if kind == "fp8 by row" else 128}
    stored, meant = quantised(tiny_target(3, **(TINY_FAMILIES[family] | sizes)), kind)
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
    on_cpu = linear.LinearForms(torch.bfloat16, CPU)
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
    with assuming((9, 0)):
        in_16_bits, in_32 = (load_target(files, dtype, meta) for dtype in (torch.bfloat16, torch.float32))
    assert isinstance(in_16_bits.layers[0].mlp.down, QuantizedLinear)
    assert not isinstance(in_32.layers[0].mlp.down, QuantizedLinear)
    assert in_16_bits.layers[0].mlp.down.num_bytes < in_32.layers[0].mlp.down.num_bytes / 3


@pytest.mark.parametrize("case", FORMAT_ERRORS)
def test_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, badly_quantised(case))
    with pytest.raises(CheckpointError, match=FORMAT_ERRORS[case][2]) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value), "the file is named"


def test_scales_of_square_grids_of_blocks_are_by_column_and_row(tmp_path: Path) -> None:
    stored, meant = quantised(tiny_target(3, hidden=256, head_dim=64), "fp8 by block")
    assert stored.tensors[f"{Q_PROJ}.weight_scale_inv"].shape == (2, 2)
    write_checkpoint(tmp_path, stored)
    torch.testing.assert_close(logits_of(load(tmp_path)), logits_of(load_tiny_target(meant)), rtol=1e-9, atol=1e-9)


def test_stacked_scales_keep_every_parts_precision() -> None:
    coarse, fine = (StoredWeight.rounded(torch.randn(8, 128)) for _ in range(2))
    coarse = replace(coarse, scales=coarse.scales.bfloat16())
    for parts in ((coarse, fine), (fine, coarse)):
        expected = torch.cat([part.matrix(F64) for part in parts])
        assert torch.equal(stacked(parts).matrix(F64), expected)


def test_a_kernel_multiplies_by_whole_runs_of_rows_and_columns() -> None:
    meta = torch.device("meta")
    with assuming((9, 0)):
        for shape, runs in {(64, 128): True, (48, 128): False, (64, 96): False}.items():
            stored = StoredWeight.rounded(torch.randn(shape))
            assert stored.runs_on(meta, torch.bfloat16) == runs, shape
            assert not stored.runs_on(meta, torch.float32)


def test_values_of_4_bits_without_zero_points_are_around_8() -> None:
    values = torch.arange(16, dtype=torch.uint8).repeat(8)[None]
    stored = StoredWeight(values, torch.full((1, 1), 0.5), None, 4, 0)
    assert torch.equal(stored.matrix(F64), (values.double() - 8) / 2)


def test_the_largest_of_a_rounded_row_is_the_largest_of_its_format() -> None:
    rounded = StoredWeight.rounded(torch.tensor([[1.0, -3.0, 0.5], [0.0, 0.0, 0.0]]))
    assert rounded.values.view(torch.float8_e4m3fn).float().abs().amax(1).tolist() == [448.0, 0.0]
    assert rounded.matrix(F64)[0, 1] == pytest.approx(-3.0)


def test_blocks_that_end_within_a_stacked_part_keep_their_rows() -> None:
    def part(rows: int) -> StoredWeight:
        scales = torch.rand(1, -(-rows // 128)) + 1
        return StoredWeight(StoredWeight.rounded(torch.randn(rows, 128)).values, scales, None, 8, 128, 128)

    parts = [part(128), part(64), part(128)]
    assert torch.equal(stacked(parts).matrix(F64), torch.cat([each.matrix(F64) for each in parts]))

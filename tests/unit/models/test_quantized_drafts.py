"""A draft has the format that its own config names, whatever its target's is."""

import json
from pathlib import Path

import pytest
import torch
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.quantized import FORMATS, quantised

from overlap_spec.errors import CheckpointError
from overlap_spec.hub.weight_files import check_draft_kind
from overlap_spec.models.drafts.eagle3 import Eagle3Weights
from overlap_spec.models.drafts.language_draft import load_language_draft
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.loader import load_eagle3
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.quantization.linear import QuantizedLinear, StoredWeight

TARGET = tiny_target(3, hidden=128)


@pytest.fixture(autouse=True)
def _keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears stay in their format, as on a GPU with kernels for it."""
    monkeypatch.setattr(StoredWeight, "runs_on", lambda self, device, dtype: True)


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    """In int4."""
    return load_tiny_target(quantised(TARGET, "awq")[0])


def head(directory: Path, target: LoadedTarget, asked: str | None = None) -> Eagle3Weights:
    loaded = load_eagle3(DraftSource.for_target(str(directory), target, quantization=asked), target)
    assert isinstance(loaded, Eagle3Weights)
    return loaded


def is_quantised(weights: Eagle3Weights) -> bool:
    return isinstance(weights.layers[0].mlp.down, QuantizedLinear)


def test_a_head_does_not_inherit_its_targets_format(tmp_path: Path, target: LoadedTarget) -> None:
    write_checkpoint(tmp_path, tiny_eagle3(4, TARGET))
    assert isinstance(target.layers[0].mlp.down, QuantizedLinear)
    assert not is_quantised(head(tmp_path, target))


def test_a_head_is_rounded_while_loading_if_that_is_asked_for(tmp_path: Path, target: LoadedTarget) -> None:
    write_checkpoint(tmp_path, tiny_eagle3(4, TARGET))
    rounded = head(tmp_path, target, "fp8")
    assert is_quantised(rounded) and not isinstance(rounded.fusion.fc, QuantizedLinear)


def test_a_head_whose_config_was_copied_from_its_target(tmp_path: Path, target: LoadedTarget) -> None:
    copied = {"quantization_config": FORMATS["fp8 by row"][0]}
    checkpoint = tiny_eagle3(4, TARGET)
    tensors = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in checkpoint.tensors.items()
    }
    write_checkpoint(tmp_path, TinyCheckpoint(checkpoint.config | copied, tensors))
    found = (
        r"model\.safetensors: tensor .*q_proj\.weight: found type bfloat16, expected float8_e4m3fn: the config names"
    )
    with pytest.raises(CheckpointError, match=found):
        head(tmp_path, target)
    assert not is_quantised(head(tmp_path, target, "unquant"))


def test_a_head_that_is_stored_in_8_bits(tmp_path: Path, target: LoadedTarget) -> None:
    stored, _ = quantised(tiny_eagle3(4, TARGET), "fp8 by row")
    write_checkpoint(tmp_path, stored)
    assert is_quantised(head(tmp_path, target))
    with pytest.raises(CheckpointError, match="found type float8_e4m3fn, expected one of"):
        head(tmp_path, target, "unquant")


def test_a_language_model_in_int4_drafts(tmp_path: Path, target: LoadedTarget) -> None:
    stored, meant = quantised(tiny_target(5, hidden=128), "gptq")
    write_checkpoint(tmp_path, stored)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "gptq"
    check_draft_kind("STANDALONE", str(tmp_path), "auto")
    draft = load_language_draft(DraftSource.for_target(str(tmp_path), target), target)
    x = torch.randn(2, 256, dtype=torch.float64)
    expected = load_tiny_target(meant).layers[1].mlp.down(x)
    torch.testing.assert_close(draft.model.layers[1].mlp.down(x), expected)
    assert draft.head.device == CPU

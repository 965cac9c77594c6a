"""Architectures by name, and what all loaders of drafts are given."""

from pathlib import Path

import pytest
import torch
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import CPU, load_tiny_target, tiny_config, tiny_target

from overlap_spec.errors import CheckpointError
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.registry import ARCHITECTURES, architecture_of
from overlap_spec.models.targets.llama import FAMILIES


def test_every_architecture_has_a_tiny_model() -> None:
    tested = {name for family in TINY_FAMILIES.values() for name in tiny_config(**family)["architectures"]}
    as_others = {"MiMoForCausalLM", "Gemma4ForConditionalGeneration"}  # see test_mtp.py and test_gemma4.py
    assert tested | as_others == set(ARCHITECTURES)
    assert set(FAMILIES) <= set(ARCHITECTURES)


def test_the_first_architecture_that_is_known_counts() -> None:
    assert architecture_of({"architectures": ["Other", "LlamaForCausalLM"]}, "x") is ARCHITECTURES["LlamaForCausalLM"]
    with pytest.raises(CheckpointError, match=r"config\.json: architecture Other is not supported; supported: Llama"):
        architecture_of({"architectures": ["Other"]}, "config.json")
    with pytest.raises(CheckpointError, match="architecture missing is not supported"):
        architecture_of({}, "config.json")


def test_a_draft_is_in_its_targets_type(tmp_path: Path) -> None:
    target = load_tiny_target(tiny_target(1), torch.bfloat16)
    (tmp_path / "config.json").write_text("{}")
    source = DraftSource.for_target(str(tmp_path), target, load_format="dummy")
    assert (source.dtype, source.device, source.is_dummy) == (torch.bfloat16, CPU, True)
    assert source.weights(str).take("fc.weight", (2, 2)).dtype == torch.bfloat16
    assert source.target_ids(target) is None

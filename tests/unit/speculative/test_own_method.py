"""A drafting method of somebody else's: named as MODULE:METHOD, imported by the worker, or refused by that name."""

from pathlib import Path

import pytest
import torch
from support.tiny.models import tiny_target, write_checkpoint

from overlap_spec.config import EngineConfig, Machine, SpecSettings
from overlap_spec.config.fields import config_fields, config_from
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import ConfigError
from overlap_spec.hub import resolve_model
from overlap_spec.speculative.drafts import NoDraft, NoProposer
from overlap_spec.speculative.methods import Method, method_of
from overlap_spec.worker.build import load_models

SILENT = Method("SILENT", key_lookahead=0, load=lambda spec, target, progress: NoDraft())
NOT_A_METHOD = "SILENT"
NAME = f"{__name__}:SILENT"


def spec_of(directory: Path, **flags: object) -> SpecSettings:
    write_checkpoint(directory, tiny_target(7))
    config = config_from({"model_path": str(directory), "skip_tokenizer_init": True} | flags)
    return resolve(config, resolve_model(config), Machine(1, False))[0].spec


def test_it_needs_no_draft_model_and_has_default_numbers(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, speculative_algorithm=NAME)
    assert (spec.method, spec.draft_path) == (NAME, None)
    assert (spec.num_steps, spec.topk, spec.width) == (3, 1, 4)
    assert method_of(spec) is SILENT


def test_it_may_have_a_draft_model(tmp_path: Path) -> None:
    assert spec_of(tmp_path, speculative_algorithm=NAME, speculative_draft_model_path="/d").draft_path == "/d"


@pytest.mark.parametrize("name", ["EAGLE9", "toy", "a/b:C", "a:b:C", ":C", "a:", "eagle:"])
def test_names_are_checked_before_anything_starts(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--speculative-algorithm: must be one of NONE, EAGLE,.*MODULE:METHOD, got"):
        config_from({"speculative_algorithm": name})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:TOY", "no_such_module:TOY: No module named 'no_such_module'; install it, or .*PYTHONPATH"),
        (f"{__name__}:MISSING", "test_own_method has no overlap_spec.speculative.methods.Method of that name"),
        (f"{__name__}:NOT_A_METHOD", "test_own_method has no overlap_spec.speculative.methods.Method of that name"),
    ],
)
def test_what_is_no_method_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-algorithm: .*{message}"):
        method_of(SpecSettings(name, None, 3, 1, 4))


def test_trees_are_for_methods_that_have_them(tmp_path: Path) -> None:
    tree = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
    write_checkpoint(tmp_path, tiny_target(7))
    config = EngineConfig(
        model_path=str(tmp_path), skip_tokenizer_init=True, dtype="float64", speculative_algorithm=NAME, **tree
    )
    settings = resolve(config, resolve_model(config), Machine(1, False))[0]
    with pytest.raises(ConfigError, match="--speculative-eagle-topk: SILENT guesses chains, got 2; use 1"):
        load_models(settings, torch.device("cpu"), lambda done, total: None)


def test_a_draft_without_weights_is_made_from_the_engines_shape() -> None:
    seen: list[object] = []

    def make(shape: object) -> NoProposer:
        seen.append(shape)
        return NoProposer()

    draft = NoDraft(make)
    assert draft.profile.kv_shape.num_layers == draft.profile.num_bytes == 0
    proposer = draft.attach(None, "a shape")
    assert isinstance(proposer, NoProposer) and seen == ["a shape"]


def test_the_flag_says_how_it_is_named() -> None:
    field = next(field for field in config_fields() if field.name == "speculative_algorithm")
    assert field.choices[-1] == "MODULE:METHOD" and "EAGLE3" in field.choices

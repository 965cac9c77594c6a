"""A logit processor of one's own is imported by name, or refused with the flag and the reason."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from support.own_processors import OWN_PROCESSORS
from support.tiny.models import tiny_target, write_checkpoint

from overlap_spec.config import EngineConfig, Machine
from overlap_spec.config.fields import config_fields, config_from
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import ConfigError
from overlap_spec.hub import resolve_model
from overlap_spec.sampling.stages import load_processor
from overlap_spec.worker.build import build
from overlap_spec.worker.startup.geometry import demand_of

NO_FUNCTION = 3


def unchanged(logits, context):
    return logits


def test_it_is_imported_by_name() -> None:
    assert load_processor(f"{__name__}:unchanged") is unchanged


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:IT", "no_such_module:IT: No module named 'no_such_module'; install it, or .*PYTHONPATH"),
        (f"{__name__}:MISSING", "test_own_processor has no function of that name"),
        (f"{__name__}:NO_FUNCTION", "test_own_processor has no function of that name"),
    ],
)
def test_what_is_no_processor_stops_the_worker_before_it_loads(tmp_path: Path, name: str, message: str) -> None:
    write_checkpoint(tmp_path, tiny_target(7))
    config = EngineConfig(model_path=str(tmp_path), skip_tokenizer_init=True, logit_processor=name)
    settings = resolve(config, resolve_model(config), Machine(1, False))[0]
    with pytest.raises(ConfigError, match=f"--logit-processor: .*{message}"):
        build(settings, lambda done, total: pytest.fail("weights are read"))


@pytest.mark.parametrize("name", ["toy", "a/b:C", "a:b:C", ":C", "a:", ""])
def test_names_are_checked_before_anything_starts(name: str) -> None:
    with pytest.raises(ConfigError, match="--logit-processor: must be MODULE:NAME, got"):
        config_from({"logit_processor": name})


def test_the_flag_says_how_it_is_named() -> None:
    (field,) = (field for field in config_fields() if field.name == "logit_processor")
    assert field.choices == ("MODULE:NAME",) and field.default is None


def test_it_is_built_into_the_engine_and_memory_is_set_aside_for_it(tmp_path: Path, monkeypatch) -> None:
    own = next(iter(OWN_PROCESSORS.values())).in_tensors
    monkeypatch.setattr("overlap_spec.worker.build.load_processor", lambda name: own)
    write_checkpoint(tmp_path, tiny_target(7))
    config = EngineConfig(
        model_path=str(tmp_path),
        skip_tokenizer_init=True,
        logit_processor="a:b",
        max_total_tokens=1000,
        dtype="float64",
    )
    settings = resolve(config, resolve_model(config), Machine(1, False))[0]
    executor, _, models = build(settings, lambda done, total: None)
    assert executor.slots.processors.own == (own,)
    executor.close()
    without = replace(settings, logit_processor=None)
    assert demand_of(settings, models).workspace > demand_of(without, models).workspace

"""Sampling defaults of a model, as its generation_config.json has them."""

import json
from pathlib import Path

import pytest

from overlap_spec.config import SamplingDefaults
from overlap_spec.errors import CheckpointError
from overlap_spec.hub.config_values import sampling_defaults


def defaults_of(directory: Path, **config: object) -> SamplingDefaults:
    (directory / "generation_config.json").write_text(json.dumps(config))
    return sampling_defaults(directory)


def test_what_the_file_has_is_read_and_the_rest_is_openais(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == SamplingDefaults()
    found = defaults_of(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, transformers_version="4.51")
    assert found == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert found.changes() == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults_of(tmp_path, top_k=0, temperature=None) == SamplingDefaults()
    rest = defaults_of(tmp_path, repetition_penalty=1.05, min_p=0.1, max_new_tokens=2048, temperature=0)
    assert rest == SamplingDefaults(repetition_penalty=1.05, min_p=0.1, max_new_tokens=2048, temperature=0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": "0.6"},
        {"temperature": True},
        {"top_k": 2.5},
        {"top_k": -2},
        {"top_p": 0},
        {"min_p": 1.5},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("nan")},
        {"max_new_tokens": 0},
    ],
    ids=str,
)
def test_a_value_out_of_range_names_the_file_and_the_way_out(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config.json: {next(iter(wrong))}.*--sampling-defaults"):
        defaults_of(tmp_path, **wrong)

"""Fields read from the struct, and the words for a bad value."""

from typing import Any

import msgspec
import pytest

from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import check_config, config_fields, config_from
from overlap_spec.errors import ConfigError


def test_every_field_has_words_a_default_and_a_kind() -> None:
    fields = {field.name: field for field in config_fields()}
    assert list(fields) == list(EngineConfig.__struct_fields__)
    assert all(field.description for field in fields.values())
    assert fields["page_size"].kind is int
    assert fields["page_size"].default == 16
    assert fields["page_size"].wanted == "a whole number at least 1 and at most 256"
    assert fields["mem_fraction_static"].wanted == "a number above 0 and below 1"
    assert fields["device"].choices == ("auto", "cpu", "cuda")
    assert fields["disable_radix_cache"].kind is bool


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("page_size", 0, "a whole number at least 1"),
        ("page_size", 257, "at most 256"),
        ("page_size", "16", "a whole number"),
        ("page_size", True, "a whole number"),
        ("port", 70000, "at most 65535"),
        ("mem_fraction_static", 1.0, "below 1"),
        ("mem_fraction_static", float("nan"), "a number above 0"),
        ("device", "tpu", "one of auto, cpu, cuda"),
        ("dtype", "int8", "one of auto, bfloat16"),
        ("speculative_algorithm", "MAGIC", "one of NONE, EAGLE, EAGLE3, .*NGRAM"),
        ("speculative_num_steps", 9, "at most 8"),
        ("random_seed", 2**63, "a whole number"),
        ("model_path", None, "text that is not empty"),
        ("api_key", "", "text that is not empty"),
        ("cuda_graph_bs", (1, 0), "a list, each a whole number at least 1"),
        ("cors_allow_origins", ("page.example",), "a list, each ORIGIN, got"),
        ("cuda_graph_bs", 4, "a list"),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_right(field: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}: must be .*{words}") as caught:
        config_from({field: value})
    assert caught.value.field == field


def test_a_struct_built_in_python_is_checked_too() -> None:
    good = EngineConfig(page_size=8, context_length=64)
    assert check_config(good) == good
    with pytest.raises(ConfigError, match="--context-length"):
        check_config(EngineConfig(context_length=3))


def test_a_list_is_read_word_by_word() -> None:
    (field,) = (field for field in config_fields() if field.name == "cuda_graph_bs")
    assert field.many and field.kind is int
    assert field.parse(["1", "8"]) == (1, 8)
    with pytest.raises(ConfigError, match="--cuda-graph-bs: must be a list, each a whole number"):
        field.parse(["1", "x"])


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        config_from({"pagesize": 3})

"""What a feature leaves behind whose folder is taken away: its flags and fields are refused by name."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.frontend_harness import serving

from overlap_spec import features
from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError
from overlap_spec.features import OWNED, absent_fields, without_absent
from overlap_spec.messages import (
    ErrorCode,
    Grammar,
    GrammarKind,
    LogProbParams,
    Reasoning,
    Rejected,
    SamplingParams,
    Thinking,
)

GIVEN = {
    "audit_rate": 0.5,
    "audit_action": "stop",
    "audit_file": "faults.jsonl",
    "recover": True,
    "max_recoveries": 7,
    "reasoning_parser": "qwen3",
    "speculative_adaptive": True,
    "speculative_adaptive_config": "rules.json",
    "enable_trace": True,
    "enable_torch_compile": True,
    "torch_compile_max_bs": 8,
    "otlp_traces_endpoint": "http://localhost:4318",
    "isolate_clients": True,
    "shared_prefix": "prompt.txt",
    "adapt_draft": True,
    "adapt_share": 0.2,
    "adapt_save": "heads",
    "speculative_ngram_min_match_window_size": 2,
    "speculative_ngram_max_match_window_size": 5,
    "speculative_ngram_min_bfs_breadth": 2,
    "speculative_ngram_max_bfs_breadth": 3,
    "speculative_ngram_match_type": "PROB",
    "speculative_ngram_branch_length": 7,
    "speculative_ngram_capacity": 4096,
    "speculative_ngram_external_corpus_path": "corpus.jsonl",
    "speculative_ngram_external_corpus_max_tokens": 1000,
    "speculative_ngram_external_sam_budget": 1,
    "speculative_fuse_ngram": 4,
}
VALUES = [(flag, value) for owned in OWNED.values() for flag, values in owned.values.items() for value in values]
FIELDS = {
    "reasoning": Reasoning("<think>", "</think>"),
    "thinking": Thinking(3, False, (1,), (2,)),
    "grammar": Grammar(GrammarKind.REGEX, "a"),
    "log_probs": LogProbParams(),
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {5: 1.0},
    "allowed_ids": b"\7\0\0\0",
    "bad_words": ("bad",),
    "bad_word_ids": ((5,),),
}


@pytest.fixture
def nothing_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [each for each in sys.modules if each.startswith("overlap_spec.features.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(features, "__path__", [str(tmp_path)])


def test_the_table_is_of_features_and_of_flags_and_fields_that_exist() -> None:
    assert set(OWNED) <= set(features.NAMES)
    flags = {flag for owned in OWNED.values() for flag in owned.flags}
    assert flags == set(GIVEN) and flags <= set(EngineConfig.__struct_fields__)
    assert {field for owned in OWNED.values() for field in owned.fields} <= set(SamplingParams.__struct_fields__)
    for owned in OWNED.values():
        replace(EngineConfig(), **owned.flags)  # what leaves it out is a value of the flag


@pytest.mark.skipif(bool(features.absent()), reason="a feature is not there")
def test_nothing_changes_while_all_are_there() -> None:
    config = EngineConfig(audit_rate=0.5, recover=True)
    assert without_absent(config) is config and not absent_fields()


@pytest.mark.parametrize("flag", GIVEN)
def test_a_flag_of_a_feature_that_is_not_there_is_refused(nothing_is_there: None, flag: str) -> None:
    owner = next(name for name, owned in OWNED.items() if flag in owned.flags)
    with pytest.raises(ConfigError, match=f"^--{flag.replace('_', '-')}: is of the feature '{owner}'") as refused:
        without_absent(replace(EngineConfig(), **{flag: GIVEN[flag]}))
    assert refused.value.field == flag


@pytest.mark.parametrize(("flag", "value"), VALUES)
def test_a_value_of_a_feature_that_is_not_there_is_refused_and_others_are_not(
    nothing_is_there: None, flag: str, value: Any
) -> None:
    owner = next(name for name, owned in OWNED.items() if flag in owned.values)
    text = f"^--{flag.replace('_', '-')}: {value} is of the feature '{owner}', which is not part of this installation$"
    with pytest.raises(ConfigError, match=text) as refused:
        without_absent(replace(EngineConfig(), **{flag: value}))
    assert refused.value.field == flag
    for other in {None, "EAGLE3", "NONE"} - {value}:
        assert getattr(without_absent(replace(EngineConfig(), speculative_algorithm=other)), flag) == other


def test_flags_that_are_not_given_leave_it_out(nothing_is_there: None) -> None:
    config = without_absent(EngineConfig(page_size=8))
    assert (config.audit_rate, config.recover, config.reasoning_parser, config.page_size) == (0.0, False, "none", 8)
    off = EngineConfig(audit_rate=0.0, recover=False)
    assert without_absent(off).audit_rate == 0.0, "that it is left out may be said"


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_feature_that_is_not_there_is_refused(nothing_is_there: None, field: str) -> None:
    async def scenario() -> None:
        async with serving() as harness:
            harness.generate("Hi", **{field: FIELDS[field]})
            refused = await harness.heard(Rejected)
            assert (refused.code, refused.field) == (ErrorCode.BAD_REQUEST, field)
            assert refused.message.startswith(f"{field} is of the feature ")
            harness.generate("Hi")
            await harness.admitted()

    asyncio.run(scenario())


def test_modules_are_in_the_tables_order_and_know_their_feature() -> None:
    for kind in (features.FRONTEND, features.SCHEDULER, features.WORKER):
        names = [features.name_of(module) for module in features.modules(kind)]
        assert names == [name for name in features.NAMES if name in names]
    assert len(features.modules(features.FRONTEND)) > 2

"""Flags beside a target whose layers recur: what is chosen, and what is refused by name."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_spec.config import EngineConfig, Machine, ModelFiles, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import ConfigError

HYBRID = ModelFiles(
    weights="/models/tiny",
    config={"architectures": ["Qwen3NextForCausalLM"], "linear_num_value_heads": 4},
    tokenizer_dir="/models/tiny",
    eos_token_ids=(2,),
    context_length=2048,
    vocab_size=100,
)
DRAFTED = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/heads/tiny"}
NGRAM = {"speculative_algorithm": "NGRAM"}
NUMBERS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def resolved(files: ModelFiles = HYBRID, **flags: Any) -> tuple[Settings, list[str]]:
    return resolve(EngineConfig(**flags), files, Machine(num_cores=2, has_cuda=False))


def test_a_methods_default_trees_become_chains() -> None:
    deep = msgspec.structs.replace(HYBRID, preset_spec=("EAGLE3", 5, 4, 8), preset_draft="/heads/tiny")
    settings, notes = resolved(deep, **DRAFTED)
    assert (settings.spec.num_steps, settings.spec.topk, settings.spec.width) == (5, 1, 6)
    assert [note for note in notes if "guesses are chains, no trees" in note]
    plain = msgspec.structs.replace(deep, config={"architectures": ["LlamaForCausalLM"]})
    assert resolved(plain, **DRAFTED)[0].spec.topk == 4


def test_n_grams_are_chains() -> None:
    spec = resolved(**NGRAM)[0].spec
    assert (spec.topk, spec.ngram.max_breadth, spec.num_steps) == (1, 1, spec.width - 1) and 1 < spec.width <= 16
    spec = resolved(**NGRAM, speculative_ngram_max_bfs_breadth=1, speculative_num_draft_tokens=7)[0].spec
    assert (spec.topk, spec.width) == (1, 7)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({**DRAFTED, **dict(zip(NUMBERS, (3, 4, 8), strict=True))}, "speculative_eagle_topk"),
        ({**NGRAM, "speculative_ngram_max_bfs_breadth": 3}, "speculative_ngram_max_bfs_breadth"),
        ({**NGRAM, "speculative_ngram_min_bfs_breadth": 2}, "speculative_ngram_min_bfs_breadth"),
        ({**NGRAM, "speculative_num_draft_tokens": 40}, "speculative_num_draft_tokens"),
    ],
)
def test_trees_that_are_asked_for_are_refused(flags: dict[str, Any], named: str) -> None:
    flag = named.replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{flag}: the target has layers with a recurrent state, which verify"):
        resolved(**flags)


def test_audits_are_off_and_refused_without_one_order_of_sums() -> None:
    assert resolved(**DRAFTED)[0].audit.rate == 0
    assert resolved(msgspec.structs.replace(HYBRID, config={}), **DRAFTED)[0].audit.rate > 0
    with pytest.raises(ConfigError, match="--audit-rate: the target has layers with a recurrent state"):
        resolved(**DRAFTED, audit_rate=0.5)
    for rate, found in ((None, 0.0), (0.5, 0.5)):
        settings, _ = resolved(**DRAFTED, audit_rate=rate, enable_deterministic_inference=True, dtype="float32")
        assert settings.audit.rate == found


def test_a_file_of_faults_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="--audit-file: no file can be written at"):
            resolved(msgspec.structs.replace(HYBRID, config={}), **DRAFTED, audit_file=str(path))
    path = str(tmp_path / "new" / "faults.jsonl")
    settings, _ = resolved(msgspec.structs.replace(HYBRID, config={}), **DRAFTED, audit_file=path)
    assert settings.audit.file == path and not Path(path).parent.exists()


def test_flags_of_states_are_settled() -> None:
    settings = resolved(mamba_ssm_dtype="bfloat16", max_mamba_cache_size=20, mamba_track_interval=512)[0]
    assert settings.model.files.config["mamba_ssm_dtype"] == "bfloat16"
    assert (settings.cache.max_states, settings.cache.snapshot_interval, settings.cache.state_ratio) == (20, 512, 0.9)
    assert settings.scheduler.max_running_requests == 19
    assert resolved(max_mamba_cache_size=900)[0].scheduler.max_running_requests == 48
    assert resolved(max_mamba_cache_size=20, disable_radix_cache=True)[0].scheduler.max_running_requests == 20
    assert resolved(mamba_full_memory_ratio=2.5, mamba_radix_cache_strategy="extra_buffer")[0].cache.state_ratio == 2.5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"max_mamba_cache_size": 1}, "--max-mamba-cache-size: found 1, expected at least 2: a state for each of 1"),
        (
            {"max_mamba_cache_size": 8, "max_running_requests": 8},
            "--max-mamba-cache-size: found 8, expected at least 9",
        ),
        ({"max_mamba_cache_size": 9, "mamba_full_memory_ratio": 1.0}, "--max-mamba-cache-size: .* leave one out"),
        ({"mamba_track_interval": 64, "disable_radix_cache": True}, "--mamba-track-interval: has no effect without"),
    ],
)
def test_flags_of_states_that_do_not_go_together(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolved(**flags)


def test_flags_of_states_are_refused_beside_other_targets() -> None:
    plain = msgspec.structs.replace(HYBRID, config={"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ConfigError, match="--mamba-ssm-dtype: the target has no layers with a recurrent state"):
        resolved(plain, mamba_ssm_dtype="float32")


def test_chains_stay_as_they_are() -> None:
    settings, notes = resolved(**DRAFTED, **dict(zip(NUMBERS, (2, 1, 3), strict=True)))
    assert (settings.spec.num_steps, settings.spec.topk, settings.spec.width) == (2, 1, 3)
    assert not [note for note in notes if "chains" in note]

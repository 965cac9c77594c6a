"""The flags of n-gram speculation: defaults, what they become, and what is refused with what to do instead."""

import shlex
from typing import Any

import msgspec
import pytest

from overlap_spec.config import EngineConfig, Machine, ModelFiles, NgramSettings, Settings
from overlap_spec.config.fields import check_config
from overlap_spec.config.resolve import resolve, settled_flags
from overlap_spec.entrypoints import cli
from overlap_spec.entrypoints.cli.flags import engine_config
from overlap_spec.errors import ConfigError

CPU = Machine(num_cores=2, has_cuda=False)
FILES = ModelFiles(
    weights="/none", config={"architectures": ["LlamaForCausalLM"]}, tokenizer_dir="/words", eos_token_ids=(),
    context_length=512, vocab_size=128, preset_draft="/head", preset_spec=("EAGLE3", 3, 1, 4),
)  # fmt: skip


def settle(files: ModelFiles = FILES, **asked: Any) -> Settings:
    """`asked`: fields of n-grams without what all their names begin with, others whole."""
    named = {name if name in EngineConfig.__struct_fields__ else f"speculative_{name}": v for name, v in asked.items()}
    return resolve(EngineConfig(speculative_algorithm="NGRAM", **named), files, CPU)[0]


def test_without_numbers_a_window_is_as_long_as_a_match_and_widths_follow_what_is_found() -> None:
    spec, scheduler = settle().spec, settle().scheduler
    assert (spec.method, spec.draft_path, spec.num_steps, spec.topk, spec.width) == ("NGRAM", None, 11, 10, 12)
    assert spec.ngram == NgramSettings(tokenizer_dir="/words")
    assert spec.narrower == (1, 2, 4, 8) and not scheduler.keeps_width
    assert settle(ngram_max_match_window_size=5).spec.width == 5
    assert settle(ngram_max_match_window_size=1).spec.width == 2


def test_explicit_draft_tokens_are_kept_but_where_nothing_matches() -> None:
    settings = settle(num_draft_tokens=16)
    assert settings.spec.width == 16 and settings.spec.narrower == (1,) and settings.scheduler.keeps_width
    settings = settle(num_draft_tokens=16, adaptive=True)
    assert settings.spec.narrower == (1, 2, 4, 8) and not settings.scheduler.keeps_width


def test_every_flag_by_its_name() -> None:
    words = shlex.split(
        "serve --speculative-algorithm NGRAM --speculative-ngram-min-match-window-size 2"
        " --speculative-ngram-max-match-window-size 8 --speculative-ngram-min-bfs-breadth 3"
        " --speculative-ngram-max-bfs-breadth 6 --speculative-ngram-match-type PROB"
        " --speculative-ngram-max-trie-depth 20 --speculative-ngram-capacity 5000"
        " --speculative-ngram-external-corpus-path /texts.jsonl --speculative-ngram-external-corpus-max-tokens 99"
    )
    config = engine_config(cli._parser(words).parse_args(words))
    settings, _ = resolve(config, FILES, CPU)
    assert settings.spec.ngram == NgramSettings(2, 8, 3, 6, True, 20, 5000, "/texts.jsonl", 99, "/words")
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings
    shown = settled_flags(config, settings)
    assert shown["speculative_ngram_branch_length"] == 20 and shown["speculative_ngram_match_type"] == "PROB"


def test_what_is_in_force_is_shown() -> None:
    shown = settled_flags(EngineConfig(speculative_algorithm="NGRAM"), settle())
    assert shown["speculative_ngram_capacity"] == 10_000_000
    assert shown["speculative_ngram_max_bfs_breadth"] == shown["speculative_eagle_topk"] == 10
    assert shown["speculative_adaptive"] is True
    explicit = EngineConfig(speculative_algorithm="NGRAM", speculative_num_draft_tokens=8)
    assert settled_flags(explicit, settle(num_draft_tokens=8))["speculative_adaptive"] is False


def test_chains_may_be_judged_by_thresholds() -> None:
    spec = settle(ngram_max_bfs_breadth=1, accept_threshold_acc=0.9).spec
    assert spec.topk == 1 and spec.accept.threshold_acc == 0.9


@pytest.mark.parametrize(
    ("field", "words", "asked"),
    [
        ("draft_model_path", "no draft model", {"draft_model_path": "/head"}),
        ("token_map", "no draft model", {"token_map": "/map.pt"}),
        ("enable_multi_layer_eagle", "no draft model", {"enable_multi_layer_eagle": True}),
        ("num_steps", "use --speculative-num-draft-tokens", {"num_steps": 3}),
        ("eagle_topk", "--speculative-ngram-max-bfs-breadth", {"eagle_topk": 4}),
        ("use_rejection_sampling", "not drawn at random", {"use_rejection_sampling": True}),
        ("accept_threshold_single", "max-bfs-breadth 1", {"accept_threshold_single": 0.5}),
        ("num_draft_tokens", "at most 64", {"num_draft_tokens": 65}),
        ("num_draft_tokens", "at most 16", {"num_draft_tokens": 17, "ngram_max_bfs_breadth": 1}),
        ("ngram_min_match_window_size", "max-match-window-size", {"ngram_min_match_window_size": 13}),
        ("ngram_min_bfs_breadth", "max-bfs-breadth", {"ngram_min_bfs_breadth": 11}),
        ("ngram_external_sam_budget", "part of the shared cache", {"ngram_external_sam_budget": 4}),
        ("ngram_external_corpus_max_tokens", "corpus-path", {"ngram_external_corpus_max_tokens": 4}),
        ("ngram_capacity", "at least 256", {"ngram_capacity": 255}),
        ("ngram_match_type", "one of BFS, PROB", {"ngram_match_type": "LRU"}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(field: str, words: str, asked: dict[str, Any]) -> None:
    flag = (field if field in EngineConfig.__struct_fields__ else f"speculative_{field}").replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{flag}: .*{words}"):
        checked(**asked)


def checked(**asked: Any) -> None:
    named = {name if name in EngineConfig.__struct_fields__ else f"speculative_{name}": v for name, v in asked.items()}
    resolve(check_config(EngineConfig(speculative_algorithm="NGRAM", **named)), FILES, CPU)


def test_a_corpus_needs_a_tokenizer() -> None:
    files = msgspec.structs.replace(FILES, tokenizer_dir=None)
    with pytest.raises(ConfigError, match="external-corpus-path: is text"):
        settle(files, ngram_external_corpus_path="/texts.jsonl")


@pytest.mark.parametrize("method", ["EAGLE3", "NONE", None])
def test_other_methods_have_no_such_flags(method: str | None) -> None:
    with pytest.raises(ConfigError, match="--speculative-ngram-capacity: .*leave it out"):
        resolve(EngineConfig(speculative_algorithm=method, speculative_ngram_capacity=1000), FILES, CPU)

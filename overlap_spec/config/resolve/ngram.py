"""Resolves the flags of n-gram speculation: limits of matches, the window's width, and flags that conflict.

The only number is the window's draft tokens; the depth and width of its tree follow from the matches.
"""

from collections.abc import Mapping

from overlap_spec.config import NGRAM, EngineConfig, ModelFiles, NgramSettings, SpecSettings
from overlap_spec.config.resolve.numbers import GIVEN, MAX_CHAIN_TOKENS, MAX_TREE_TOKENS
from overlap_spec.config.speculation import BLOCK_FLAGS
from overlap_spec.errors import ConfigError

PREFIX = "speculative_ngram_"
_DRAFT_MODEL = "NGRAM has no draft model; leave it out"
_NO_STEPS = "NGRAM takes no draft steps: what is found decides; leave it out, and use --speculative-num-draft-tokens"
_NOT_FOR_NGRAM = {
    "speculative_draft_model_path": _DRAFT_MODEL,
    "speculative_draft_model_revision": _DRAFT_MODEL,
    "speculative_draft_load_format": _DRAFT_MODEL,
    "speculative_draft_model_quantization": _DRAFT_MODEL,
    "speculative_draft_attention_backend": _DRAFT_MODEL,
    "speculative_draft_window_size": _DRAFT_MODEL,
    "speculative_moe_runner_backend": _DRAFT_MODEL,
    "speculative_moe_a2a_backend": _DRAFT_MODEL,
    "speculative_token_map": _DRAFT_MODEL,
    "enable_multi_layer_eagle": _DRAFT_MODEL,
    "speculative_num_steps": _NO_STEPS,
    **dict.fromkeys(
        (block.field for block in BLOCK_FLAGS.values()),
        "NGRAM guesses no blocks; leave it out, and use --speculative-num-draft-tokens",
    ),
    "speculative_eagle_topk": "how wide NGRAM's trees are, says --speculative-ngram-max-bfs-breadth; leave it out",
    "speculative_use_rejection_sampling": "NGRAM's guesses are not drawn at random; leave it out",
}


def refuse_flags(config: EngineConfig, reasons: Mapping[str, str]) -> None:
    """Refuse each of these fields that was given. Raises: ConfigError naming the flag, with its reason."""
    for field, why in reasons.items():
        if getattr(config, field) not in (None, False):
            raise ConfigError(field, why)


def refuse_ngram_flags(config: EngineConfig) -> None:
    """Refuse n-gram flags for every other method. Raises: ConfigError naming the flag."""
    fields = [field for field in config.__struct_fields__ if field.startswith(PREFIX)]
    refuse_flags(config, dict.fromkeys(fields, "goes with --speculative-algorithm NGRAM alone; leave it out"))


def resolve_ngram(config: EngineConfig, files: ModelFiles) -> SpecSettings:
    """Resolve all n-gram flags. Raises: ConfigError naming the flag."""
    refuse_flags(config, _NOT_FOR_NGRAM)
    ngram = _settings(config, files)
    asked, most = config.speculative_num_draft_tokens, MAX_TREE_TOKENS
    if ngram.max_breadth == 1:
        most = MAX_CHAIN_TOKENS
    else:
        _refuse_thresholds(config)
    if asked is not None and asked > most:
        raise ConfigError("speculative_num_draft_tokens", f"a window of NGRAM has at most {most} tokens, got {asked}")
    width = asked or max(min(ngram.max_match, most), 2)
    source = GIVEN if asked is not None else "as many as a match may have"
    return SpecSettings(NGRAM, None, width - 1, ngram.max_breadth, width, ngram=ngram, numbers_from=source)


def settled_ngram_flags(spec: SpecSettings) -> dict[str, object]:
    """The n-gram flags with their resolved values; empty for another method."""
    ngram = spec.ngram
    if spec.method != NGRAM:
        return {}
    values = {
        "min_match_window_size": ngram.min_match,
        "max_match_window_size": ngram.max_match,
        "min_bfs_breadth": ngram.min_breadth,
        "max_bfs_breadth": ngram.max_breadth,
        "match_type": "PROB" if ngram.by_frequency else "BFS",
        "branch_length": ngram.branch,
        "capacity": ngram.capacity,
        "external_corpus_max_tokens": ngram.corpus_tokens if ngram.corpus is not None else None,
    }
    return {PREFIX + name: value for name, value in values.items()}


def _settings(config: EngineConfig, files: ModelFiles) -> NgramSettings:
    default = NgramSettings()

    def asked(field: str, otherwise: int) -> int:
        value: int | None = getattr(config, PREFIX + field)
        return otherwise if value is None else value

    settings = NgramSettings(
        min_match=asked("min_match_window_size", default.min_match),
        max_match=asked("max_match_window_size", default.max_match),
        min_breadth=asked("min_bfs_breadth", default.min_breadth),
        max_breadth=asked("max_bfs_breadth", default.max_breadth),
        by_frequency=config.speculative_ngram_match_type == "PROB",
        branch=asked("branch_length", default.branch),
        capacity=asked("capacity", default.capacity),
        corpus=config.speculative_ngram_external_corpus_path,
        corpus_tokens=asked("external_corpus_max_tokens", default.corpus_tokens),
        tokenizer_dir=files.tokenizer_dir,
    )
    for least, most, given in (
        ("min_match_window_size", "max_match_window_size", (settings.min_match, settings.max_match)),
        ("min_bfs_breadth", "max_bfs_breadth", (settings.min_breadth, settings.max_breadth)),
    ):
        if given[0] > given[1]:
            raise ConfigError(PREFIX + least, f"must be at most --{(PREFIX + most).replace('_', '-')}, got {given}")
    _check_corpus(config, settings)
    return settings


def _check_corpus(config: EngineConfig, settings: NgramSettings) -> None:
    if config.speculative_ngram_external_sam_budget is not None:
        raise ConfigError(
            PREFIX + "external_sam_budget",
            "a corpus is a part of the shared cache, whose matches compete by their length; leave it out",
        )
    if settings.corpus is None:
        if config.speculative_ngram_external_corpus_max_tokens is not None:
            raise ConfigError(
                PREFIX + "external_corpus_max_tokens",
                "has no effect without --speculative-ngram-external-corpus-path; leave it out",
            )
        return
    if settings.tokenizer_dir is None:
        raise ConfigError(
            PREFIX + "external_corpus_path", "is text, and cannot go with --skip-tokenizer-init, which has no tokenizer"
        )


def _refuse_thresholds(config: EngineConfig) -> None:
    for name in ("single", "acc"):
        field = f"speculative_accept_threshold_{name}"
        if getattr(config, field) not in (None, 1.0):
            raise ConfigError(
                field, "judges chains: use --speculative-ngram-max-bfs-breadth 1 as well, or leave it out"
            )

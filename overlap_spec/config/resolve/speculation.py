"""Resolves the flags of speculation: the method, its numbers, its verifier and its step widths.

A `--speculative-adaptive-config` file is JSON in SGLang's form, with SGLang's defaults:

    {"1": {"candidate_steps": [1, 3, 7]}, "8": {"candidate_steps": [0, 1, 3]}, "ema_alpha": 0.2}

Keys that are whole numbers are batch sizes: an entry applies from its batch size up to the next one. Every other key is
a default of all entries. Unknown keys and values that cannot run are refused.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from overlap_spec.config import (
    NGRAM,
    PLAIN,
    AcceptSettings,
    EngineConfig,
    Machine,
    ModelFiles,
    SpecSettings,
    WidthRule,
    facts_of,
    synthetic_acceptance,
)
from overlap_spec.config.resolve.ngram import refuse_flags, refuse_ngram_flags, resolve_ngram
from overlap_spec.config.resolve.numbers import FIELDS, GIVEN, MAX_CHAIN_TOKENS, resolve_numbers
from overlap_spec.config.speculation import (
    BLOCK_FLAGS,
    MAX_STEPS,
    METHOD_FACTS,
    MTP,
    ONLY_CHAINS,
    keeps_states,
    methods_where,
    num_own_layers,
)
from overlap_spec.errors import ConfigError

FLAG = "--enable-multi-layer-eagle"


def brings_draft(config: EngineConfig, files: ModelFiles) -> bool:
    """Whether the target's config names MTP layers in its checkpoint.

    Raises: ConfigError if the flag does not fit the number of layers.
    """
    found = num_own_layers(files.config)
    if found > 1 and not config.enable_multi_layer_eagle:
        raise ConfigError(
            "speculative_algorithm",
            f"the target brings {found} MTP layers, one for each guess: add {FLAG}, or name a draft head with"
            " --speculative-draft-model-path",
        )
    if found == 1 and config.enable_multi_layer_eagle:
        raise ConfigError(
            "enable_multi_layer_eagle", "the target brings one MTP layer, which is run for every guess; leave it out"
        )
    return found > 0


def with_layers(spec: SpecSettings, config: EngineConfig, files: ModelFiles) -> SpecSettings:
    """With the flag, give each guess an MTP layer of its own.

    Raises: ConfigError naming the flag that conflicts, or the number of layers.
    """
    if not config.enable_multi_layer_eagle:
        return spec
    if not facts_of(config.speculative_algorithm or PLAIN).uses_own_layer:
        known = methods_where("uses_own_layer")
        raise ConfigError(
            "enable_multi_layer_eagle",
            f"drafts with a checkpoint's own MTP layers: it needs --speculative-algorithm {' or '.join(known)}",
        )
    if spec.topk > 1:
        raise ConfigError("speculative_eagle_topk", f"{FLAG} drafts a chain, a layer for each guess: use 1")
    if spec.token_map is not None:
        raise ConfigError("speculative_token_map", f"is not supported with {FLAG}: leave one of them out")
    num_steps = spec.num_steps
    if spec.draft_path == files.weights and num_steps > (found := num_own_layers(files.config)):
        if spec.numbers_from == GIVEN:
            raise ConfigError(
                "speculative_num_steps",
                f"the target brings {found} MTP layers, one for each draft step of {FLAG}: give at most {found},"
                f" got {num_steps}",
            )
        num_steps = found
    return msgspec.structs.replace(spec, method=MTP, multi_layer=True, num_steps=num_steps, width=num_steps + 1)


FIELD = "speculative_adaptive_config"


def read_width_rules(path: str, initial_steps: int | None) -> tuple[WidthRule, ...]:
    """One rule per batch size, ascending. `initial_steps` None: the middle of all candidates. Raises: ConfigError."""
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(FIELD, f"{path} must hold a JSON object")
    entries = {int(key): value for key, value in content.items() if key.isdigit()}
    shared = {key: value for key, value in content.items() if not key.isdigit()}
    if not entries:
        raise ConfigError(FIELD, f'{path} names no batch size, as in {{"1": {{"candidate_steps": [1, 3]}}}}')
    rules = [_rule(path, batch_size, shared, entry) for batch_size, entry in sorted(entries.items())]
    every = sorted({steps for rule in rules for steps in rule.candidate_steps})
    if every == [0]:
        raise ConfigError(FIELD, f"{path} has no candidate_steps above 0; use --speculative-algorithm NONE")
    initial = every[len(every) // 2] if initial_steps is None else initial_steps
    return tuple(msgspec.structs.replace(rule, initial_steps=_nearest(rule, initial)) for rule in rules)


def _rule(path: str, batch_size: int, shared: dict[str, Any], entry: Any) -> WidthRule:
    if not isinstance(entry, dict):
        raise ConfigError(FIELD, f"{path}: the entry of batch size {batch_size} must be an object")
    known = set(WidthRule.__struct_fields__) - {"batch_size", "initial_steps"}
    for key in {**shared, **entry}.keys() - known:
        raise ConfigError(FIELD, f"{path}: {key} is not supported; known are {', '.join(sorted(known))}")
    try:
        rule = msgspec.convert({**shared, **entry, "batch_size": batch_size}, WidthRule)
    except msgspec.ValidationError as error:
        raise ConfigError(FIELD, f"{path}, batch size {batch_size}: {error}") from None
    if not rule.candidate_steps or max(rule.candidate_steps) > MAX_STEPS:
        raise ConfigError(
            FIELD, f"{path}, batch size {batch_size}: candidate_steps must be one or more, of at most {MAX_STEPS}"
        )
    return msgspec.structs.replace(rule, candidate_steps=tuple(sorted(set(rule.candidate_steps))))


def _nearest(rule: WidthRule, steps: int) -> int:
    """The initial number of steps of a rule: `steps` if that is a candidate, else the middle one."""
    candidates = rule.candidate_steps
    return steps if steps in candidates else candidates[len(candidates) // 2]


OF_MASK_ROWS = (7, 1, 8)  # steps, topk, draft tokens
TREE_WIDTHS = (1, 2, 4, 8, 16, 32)  # narrower widths for the steps of trees
NEEDS_SPECULATION = (
    "speculative_draft_load_format",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_simulate_acc_len",
)
NEEDS_DRAFT_MODEL = NEEDS_SPECULATION[:-1]


def resolve_speculation(
    config: EngineConfig, files: ModelFiles, machine: Machine, notes: list[str], only_chains: str = ""
) -> tuple[SpecSettings, tuple[WidthRule, ...]]:
    """Resolve the method, its numbers and its verifier; adjustments are added to `notes`.

    `only_chains`: why no trees are guessed; empty: they may be.
    Raises: ConfigError naming the flag.
    """
    spec = with_layers(_resolve_spec(config, files, notes), config, files)
    if spec.topk > 1 and (why := ONLY_CHAINS if keeps_states(files.config) else only_chains):
        spec = _as_chain(spec, config, notes, why)
    if spec.method != NGRAM:
        refuse_ngram_flags(config)
    spec = _with_branch(spec, config, ONLY_CHAINS if keeps_states(files.config) else only_chains)
    rules = _resolve_rules(config, spec)
    spec = _with_bench_flags(_with_widths(spec, config, rules), config, notes)
    if spec.width > 1 and spec.numbers_from != GIVEN:
        numbers = (spec.num_steps, spec.topk, spec.width)
        notes.append(f"speculative steps, topk and draft tokens set to {numbers}: {spec.numbers_from}")
    return msgspec.structs.replace(spec, accept=_resolve_accept(config, spec, machine)), rules


def _resolve_spec(config: EngineConfig, files: ModelFiles, notes: list[str]) -> SpecSettings:
    """The method, its draft and its numbers. An alias has defaults for all three, which flags override."""
    method = _method_of(config, files)
    if method == PLAIN:
        if config.speculative_algorithm is not None:
            _refuse_with_none(config)
        return SpecSettings(PLAIN, None, 0, 0, 1)
    if method == NGRAM:
        return resolve_ngram(config, files)
    has_preset = files.preset_spec is not None and files.preset_spec[0] == method
    draft = config.speculative_draft_model_path or (files.preset_draft if has_preset else None)
    if draft is None and facts_of(method).uses_own_layer and brings_draft(config, files):
        if config.speculative_draft_model_revision is not None:
            raise ConfigError(
                "speculative_draft_model_revision",
                "the draft is a layer of the target's own checkpoint: use --revision",
            )
        method, draft = MTP, files.weights
    if draft is None and facts_of(method).draft_kinds:
        raise ConfigError("speculative_draft_model_path", f"{method} needs a draft model: give its directory or hub id")
    if draft is None:
        refuse_flags(config, dict.fromkeys(NEEDS_DRAFT_MODEL, f"{method} was given no draft model; leave it out"))
    numbers = resolve_numbers(config, files, notes)
    return SpecSettings(
        method,
        draft,
        *numbers.counts,
        token_map=_resolve_token_map(config, method),
        numbers_from=numbers.source,
    )


def _as_chain(spec: SpecSettings, config: EngineConfig, notes: list[str], why: str) -> SpecSettings:
    """Where no trees are verified, and why. Raises: ConfigError naming the flag that asks for one."""
    asked = {
        "speculative_eagle_topk": spec.numbers_from == GIVEN and spec.method != NGRAM,
        "speculative_ngram_min_bfs_breadth": spec.ngram.min_breadth > 1,
        "speculative_ngram_max_bfs_breadth": config.speculative_ngram_max_bfs_breadth is not None,
        "speculative_num_draft_tokens": spec.width > MAX_CHAIN_TOKENS,
    }
    for field, is_asked in asked.items():
        if is_asked:
            most = MAX_CHAIN_TOKENS if field == "speculative_num_draft_tokens" else 1
            raise ConfigError(field, f"{why}, got {getattr(config, field)}; use at most {most}")
    notes.append(f"guesses are chains, no trees: {why}")
    width = spec.width if spec.method == NGRAM else spec.num_steps + 1
    ngram = msgspec.structs.replace(spec.ngram, max_breadth=1)
    return msgspec.structs.replace(spec, topk=1, width=width, num_steps=width - 1, ngram=ngram)


def _with_branch(spec: SpecSettings, config: EngineConfig, only_chains: str) -> SpecSettings:
    """A window that holds the guesses of n-grams too. Raises: ConfigError naming what does not go with that."""
    count = config.speculative_fuse_ngram
    if count is None:
        return spec
    reasons = {
        only_chains: bool(only_chains),
        "is a branch beside a draft's chain: name a method with a draft model": spec.draft_path is None,
        "is a branch beside a chain: use --speculative-eagle-topk 1, or leave it out": spec.topk > 1,
        f"is not supported with {FLAG}: leave one of them out": spec.multi_layer,
        "makes trees of windows, which --speculative-use-rejection-sampling does not judge": (
            config.speculative_use_rejection_sampling
        ),
        "makes windows wider than the steps that --speculative-adaptive-config counts": (
            config.speculative_adaptive_config is not None
        ),
    }
    for why, is_so in reasons.items():
        if is_so:
            raise ConfigError("speculative_fuse_ngram", why)
    return msgspec.structs.replace(spec, num_copied=count, width=spec.width + count)


def _method_of(config: EngineConfig, files: ModelFiles) -> str:
    """The method that the flag names, else the alias's, else none.

    Raises: ConfigError if other flags need a method and none is named.
    """
    if config.speculative_algorithm is not None:
        return config.speculative_algorithm
    of_a_method = (
        "speculative_draft_model_path",
        "speculative_token_map",
        *(block.field for block in BLOCK_FLAGS.values()),
        *(() if files.preset_spec else FIELDS),
    )
    if any(getattr(config, field) is not None for field in of_a_method):
        known = ", ".join(METHOD_FACTS)
        raise ConfigError(
            "speculative_algorithm", f"missing: another --speculative flag was given; name one of {known}"
        )
    return PLAIN if files.preset_spec is None else files.preset_spec[0]


def _resolve_token_map(config: EngineConfig, method: str) -> str | None:
    path = config.speculative_token_map
    if path is not None and not facts_of(method).takes_token_map:
        known = methods_where("takes_token_map")
        raise ConfigError(
            "speculative_token_map",
            f"{method} heads have a vocabulary of their own, with a map in the checkpoint (d2t); leave it out, or use"
            f" {' or '.join(known)}",
        )
    return path


def _resolve_accept(config: EngineConfig, spec: SpecSettings, machine: Machine) -> AcceptSettings:
    """The rule of acceptance: matching, unless flags choose another."""
    single, acc = config.speculative_accept_threshold_single, config.speculative_accept_threshold_acc
    accept = AcceptSettings(config.speculative_use_rejection_sampling, single or 1.0, acc or 1.0)
    forced = machine.forces_greedy_verify and spec.method == NGRAM
    if accept == AcceptSettings():
        return AcceptSettings(ngram_force_greedy_verify=forced)
    field = accept.asked_by
    assert field is not None
    if accept.rejection and accept.thresholds:
        raise ConfigError(field, "must be 1.0 with --speculative-use-rejection-sampling, which has no thresholds")
    if spec.width == 1:
        raise ConfigError(field, "has no effect without speculation; leave it out")
    if spec.topk > 1 and accept.rejection:
        raise ConfigError(field, "judges chains: use --speculative-eagle-topk 1, or leave it out")
    if forced:
        raise ConfigError(field, "has no effect with SGLANG_NGRAM_FORCE_GREEDY_VERIFY; leave one of them out")
    if config.enable_torch_compile:
        raise ConfigError("enable_torch_compile", f"compiles a sampler that --{field.replace('_', '-')} does not use")
    return accept


def _with_bench_flags(spec: SpecSettings, config: EngineConfig, notes: list[str]) -> SpecSettings:
    """Add the draft's load format and synthetic acceptance."""
    means = config.speculative_simulate_acc_len or ()
    if spec.width == 1:
        refuse_flags(config, dict.fromkeys(NEEDS_SPECULATION, "has no effect without speculation; leave it out"))
        return spec
    if means:
        longest = min(spec.width, spec.num_steps + 1)
        if max(means) > longest:
            raise ConfigError(
                "speculative_simulate_acc_len",
                f"a step commits at most {longest} tokens (the draft's), got {max(means)}",
            )
        notes.append(synthetic_acceptance(means))
    inherited = "auto" if config.load_format == "gguf" else config.load_format  # a draft is never a .gguf file
    return msgspec.structs.replace(
        spec,
        draft_load_format=config.speculative_draft_load_format or inherited,
        draft_quantization=config.speculative_draft_model_quantization,
        divides_draft=config.speculative_draft_tp_size != 1,
        simulated_accept_lens=means,
    )


def _resolve_rules(config: EngineConfig, spec: SpecSettings) -> tuple[WidthRule, ...]:
    """Read the rules of step widths. `resolve` reads no other file: its content is part of the request, as a flag."""
    if spec.width == 1 and config.speculative_adaptive:
        raise ConfigError("speculative_adaptive", "has no effect without speculation; leave it out")
    path = config.speculative_adaptive_config
    if path is None:
        return ()
    if spec.topk > 1:
        flag = "--speculative-ngram-max-bfs-breadth" if spec.method == NGRAM else "--speculative-eagle-topk"
        raise ConfigError("speculative_adaptive_config", f"counts the steps of chains: use {flag} 1")
    if not config.speculative_adaptive:
        raise ConfigError("speculative_adaptive_config", "has no effect without --speculative-adaptive")
    return read_width_rules(path, config.speculative_num_steps)


def _with_widths(spec: SpecSettings, config: EngineConfig, rules: tuple[WidthRule, ...]) -> SpecSettings:
    """Add narrower step widths. Explicit numbers are kept, unless the adaptive flag makes them a starting point."""
    if rules:
        *fewer, num_steps = sorted({steps for rule in rules for steps in rule.candidate_steps})
        if spec.multi_layer and num_steps > spec.num_steps:
            raise ConfigError(
                "speculative_adaptive_config",
                f"has candidate_steps of up to {num_steps}, and there are {spec.num_steps} layers, one for each step",
            )
        narrower = tuple(steps + 1 for steps in fewer)
        return msgspec.structs.replace(spec, num_steps=num_steps, width=num_steps + 1, narrower=narrower)
    if spec.width == 1:
        return spec
    if keeps_width(spec, config):
        return msgspec.structs.replace(spec, narrower=(1,)) if spec.method == NGRAM else spec
    return msgspec.structs.replace(spec, narrower=_narrower(spec))


def _narrower(spec: SpecSettings) -> tuple[int, ...]:
    """Of a chain with a branch beside it also the chain alone."""
    chain = spec.width - spec.num_copied
    widths = TREE_WIDTHS if spec.topk > 1 else tuple(w for w in range(1, chain) if w <= 3 or w % 2 == 0)
    alone = (chain,) if spec.num_copied else ()
    return tuple(w for w in (*widths, *alone) if w < spec.width)


def with_mask_rows(spec: SpecSettings, notes: list[str]) -> SpecSettings:
    """Of a head that has rows of masks: trees that are a default become a chain."""
    if spec.topk == 1 or spec.numbers_from == GIVEN:
        return spec
    steps, topk, width = OF_MASK_ROWS
    why = "the default of a P-EAGLE head"
    chain = msgspec.structs.replace(spec, num_steps=steps, topk=topk, width=width, numbers_from=why)
    notes.append(f"speculative steps, topk and draft tokens set to {OF_MASK_ROWS}: {why}")
    return msgspec.structs.replace(chain, narrower=_narrower(chain))


def keeps_width(spec: SpecSettings, config: EngineConfig) -> bool:
    """Whether every step with guesses has the width that the user gave."""
    return spec.numbers_from == GIVEN and not config.speculative_adaptive


def _refuse_with_none(config: EngineConfig) -> None:
    for field in config.__struct_fields__:
        is_given = getattr(config, field) not in (None, False)
        if field.startswith("speculative_") and field != "speculative_algorithm" and is_given:
            raise ConfigError(field, "has no effect with --speculative-algorithm NONE; leave it out")

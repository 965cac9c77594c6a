"""Reads a `--speculative-adaptive-config` file: JSON in SGLang's form, with SGLang's defaults.

    {"1": {"candidate_steps": [1, 3, 7]}, "8": {"candidate_steps": [0, 1, 3]}, "ema_alpha": 0.2}

Keys that are whole numbers are batch sizes: an entry applies from its batch size up to the next one. Every other key is
a default of all entries. Unknown keys and values that cannot run are refused.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from overlap_spec.config import WidthRule
from overlap_spec.config.speculation import MAX_STEPS
from overlap_spec.errors import ConfigError

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

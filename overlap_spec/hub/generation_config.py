"""Facts of a model's generation_config.json: the ids that end a turn, and how its makers would sample."""

import math
from pathlib import Path
from typing import Any

import msgspec

from overlap_spec.config import SamplingDefaults
from overlap_spec.errors import CheckpointError
from overlap_spec.hub.json_file import read_json

NAME = "generation_config.json"


def eos_token_ids(directory: Path, model: dict[str, Any]) -> tuple[int, ...]:
    """All ids that end a turn, unchecked: generation_config.json often lists more than config.json."""
    found: list[Any] = []
    for config in (_generation_config(directory), model):
        ids = config.get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple({repr(token): token for token in found}.values())  # what is no id may not be hashable


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Values that the file itself has; `do_sample` has no effect, as in SGLang and vLLM.

    Raises: CheckpointError naming the file and the value.
    """
    config = _generation_config(directory)
    given = {name: config[name] for name in SamplingDefaults.__struct_fields__ if config.get(name) is not None}
    if given.get("top_k") == 0:
        given["top_k"] = -1  # both mean all tokens
    for name, value in given.items():
        if not _is_valid(name, value):
            raise CheckpointError(
                f"{directory / NAME}: {name} {value!r} is out of range; --sampling-defaults openai does without it"
            )
    return msgspec.convert(given, SamplingDefaults)


def _is_valid(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    match name:
        case "temperature":
            return value >= 0
        case "top_k":
            return isinstance(value, int) and (value == -1 or value >= 1)
        case "top_p":
            return 0 < value <= 1
        case "min_p":
            return 0 <= value <= 1
        case "repetition_penalty":
            return 0 < value <= 2
        case _:
            return isinstance(value, int) and value >= 1


def _generation_config(directory: Path) -> dict[str, Any]:
    path = directory / NAME
    return read_json(path) if path.is_file() else {}

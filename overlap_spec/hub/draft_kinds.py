"""Refuses a draft head given as target, and a draft of another method, before any process starts.

The names of its tensors tell what a checkpoint is, and safetensors files list them in their headers. A .bin can only be
opened with torch, so the worker checks it, before it loads the target.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_spec.config import DUMMY, facts_of
from overlap_spec.config.draft_kind import DraftKind, Shapes, can_only_draft, draft_kind
from overlap_spec.config.methods import METHOD_FACTS
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.hub.weight_files import headers_in, open_safetensors, weight_files


def refuse_head(directory: Path, config: Mapping[str, Any], load_format: str) -> None:
    """Raises: ConfigError if the directory of a target holds a draft head. `config`: its config.json."""
    if _is_named_head(config) or can_only_draft(_stored_shapes(directory, load_format)):
        raise ConfigError(
            "model_path", f"{directory} is a draft head, not a target; give it as --speculative-draft-model-path"
        )


def check_draft_kind(method: str, directory: str, load_format: str) -> None:
    """Run `refuse_other_kind` on the safetensors of a directory; other formats pass."""
    if shapes := _stored_shapes(Path(directory), load_format):
        refuse_other_kind(method, directory, shapes)


def refuse_other_kind(method: str, directory: str, shapes: Shapes) -> None:
    """Raises: CheckpointError if a draft is not of the method's kind, naming the method that it fits."""
    wanted, found = facts_of(method).draft_kinds, draft_kind(shapes)
    if not wanted or found in wanted:
        return
    other = _usual_method(found)
    hint = "" if other is None else f"; use --speculative-algorithm {other}, or another draft"
    raise CheckpointError(f"{directory}: it looks like {found.value}, but {method} drafts with {wanted[0].value}{hint}")


def method_of_draft(directory: Path, load_format: str = "auto") -> str | None:
    """The method that a draft is for, by the names of its safetensors; None if they do not tell."""
    return _usual_method(draft_kind(_stored_shapes(directory, load_format)))


def _usual_method(kind: DraftKind) -> str | None:
    return next((name for name, facts in METHOD_FACTS.items() if kind in facts.draft_kinds[:1]), None)


def _is_named_head(config: Mapping[str, Any]) -> bool:
    """Whether the architecture names a draft head; many heads have their target's architecture instead."""
    names = map(str, config.get("architectures") or ())
    return config.get("draft_vocab_size") is not None or any(name.endswith(("Eagle", "Eagle3")) for name in names)


def _stored_shapes(directory: Path, load_format: str) -> Shapes:
    """Shapes of the tensors by name; empty if torch is needed to read them, or without weights."""
    files = [] if load_format == DUMMY else weight_files(directory, load_format)
    handles = (open_safetensors(file, "np") for file in files if file.suffix == ".safetensors")
    return {name: shape for handle in handles for name, shape, _ in headers_in(handle)}

"""Resolves the name of a model (alias, directory, .gguf file, hub id) to local files."""

from overlap_spec.hub.draft_checks import check_draft_kind, check_draft_vocabulary, method_of_draft, refuse_other_kind
from overlap_spec.hub.resolve import (
    check_corpus,
    is_local,
    resolve_draft,
    resolve_drafting,
    resolve_model,
    resolve_token_map,
)
from overlap_spec.hub.snapshots import Progress, ignore_progress

__all__ = [
    "Progress",
    "check_corpus",
    "check_draft_kind",
    "check_draft_vocabulary",
    "ignore_progress",
    "is_local",
    "method_of_draft",
    "refuse_other_kind",
    "resolve_draft",
    "resolve_drafting",
    "resolve_model",
    "resolve_token_map",
]

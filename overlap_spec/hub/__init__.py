"""Resolves the name of a model (alias, directory, .gguf file, hub id) to local files."""

from overlap_spec.hub.draft_kinds import check_draft_kind, method_of_draft, refuse_other_kind
from overlap_spec.hub.progress import Progress, ignore_progress
from overlap_spec.hub.resolve import (
    check_corpus,
    is_local,
    resolve_draft,
    resolve_drafting,
    resolve_model,
    resolve_token_map,
)
from overlap_spec.hub.vocabulary import check_draft_vocabulary

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

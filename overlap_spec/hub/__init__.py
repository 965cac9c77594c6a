"""Resolves the name of a model (alias, directory, .gguf file, hub id) to local files."""

from overlap_spec.hub.draft_kinds import check_draft_kind, refuse_other_kind
from overlap_spec.hub.resolve import check_corpus, resolve_draft, resolve_drafting, resolve_model, resolve_token_map
from overlap_spec.hub.vocabulary import check_draft_vocabulary

__all__ = [
    "check_corpus",
    "check_draft_kind",
    "check_draft_vocabulary",
    "refuse_other_kind",
    "resolve_draft",
    "resolve_drafting",
    "resolve_model",
    "resolve_token_map",
]

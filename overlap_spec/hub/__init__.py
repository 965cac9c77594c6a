"""Resolves the name of a model (alias, directory, .gguf file, hub id) to local files."""

from overlap_spec.hub.resolve import (
    check_corpus as check_corpus,
    is_local as is_local,
    resolve_draft as resolve_draft,
    resolve_drafting as resolve_drafting,
    resolve_model as resolve_model,
    resolve_token_map as resolve_token_map,
)
from overlap_spec.hub.snapshots import Progress as Progress, ignore_progress as ignore_progress
from overlap_spec.hub.weight_files import (
    check_draft_kind as check_draft_kind,
    check_draft_vocabulary as check_draft_vocabulary,
    method_of_draft as method_of_draft,
    refuse_other_kind as refuse_other_kind,
)

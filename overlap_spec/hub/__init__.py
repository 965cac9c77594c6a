"""Turns what a user names (alias, directory, .gguf file, hub id) into local files. Not here: reading weights, torch."""

from overlap_spec.hub.resolve import resolve_draft, resolve_model

__all__ = ["resolve_draft", "resolve_model"]

"""Decoding loops and draft heads, written out: the oracles."""

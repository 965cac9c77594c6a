"""Guesses that are looked up in what was said before, without a draft model."""

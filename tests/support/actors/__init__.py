"""Fake actors."""

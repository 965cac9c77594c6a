"""Loads models from checkpoints."""

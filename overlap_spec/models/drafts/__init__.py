"""The draft models."""

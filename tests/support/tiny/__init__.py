"""Tiny random models."""

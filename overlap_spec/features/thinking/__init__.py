"""Reasoning before an answer: where it begins, and a budget for it."""

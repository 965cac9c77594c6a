"""Weights in fewer bits than the model computes in."""

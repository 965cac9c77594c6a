"""Draws tokens: filters, noise, the sampler."""

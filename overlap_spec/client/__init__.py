"""The client of a running engine, over ZeroMQ."""

from overlap_spec.client.client import AnyPrompt, Client

__all__ = ["AnyPrompt", "Client"]

"""Guesses that are looked up in what was said before, without a draft model. Here: what the worker tells of them."""

from overlap_spec.messages import Extension


class DividedLog(Extension, frozen=True):
    """Requests find only what those of their owner have said (`ResetSlot.owner`)."""


EXTENSIONS = (DividedLog,)

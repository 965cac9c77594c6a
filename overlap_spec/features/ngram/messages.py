"""From the worker: its log of n-grams is divided."""

from overlap_spec.messages import Extension


class DividedLog(Extension, frozen=True):
    """Requests find only what those of their owner have said (`ResetSlot.owner`)."""


EXTENSIONS = (DividedLog,)

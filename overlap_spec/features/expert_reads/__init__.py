"""How many distinct experts the decode steps of a mixture read: what its steps cost beside their width.

The worker counts, and tells the scheduler, which reports it.
"""

from overlap_spec.messages import Extension


class ExpertLayers(Extension, frozen=True):
    """Of `WorkerReady`: each mixture of the target has so many experts."""

    num_experts: int


class ExpertsRead(Extension, frozen=True):
    """Worker to scheduler, now and then. Since start: distinct experts of decode steps, summed over `layers` runs."""

    experts: int
    layers: int


EXTENSIONS = (ExpertLayers, ExpertsRead)

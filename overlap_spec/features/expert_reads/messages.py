"""Between worker and scheduler: that a target has experts, and how many of them its decode steps have read."""

from overlap_spec.messages import Extension


class ExpertLayers(Extension, frozen=True):
    """Of `WorkerReady`: each mixture of the target has so many experts."""

    num_experts: int


class ExpertsRead(Extension, frozen=True):
    """Worker to scheduler, now and then. Since start: distinct experts of decode steps, summed over `layers` runs."""

    experts: int
    layers: int


EXTENSIONS = (ExpertLayers, ExpertsRead)

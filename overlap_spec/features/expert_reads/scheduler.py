"""Puts into each report how many distinct experts a layer has read in a decode step."""

from msgspec.structs import replace

from overlap_spec.features.expert_reads import ExpertLayers, ExpertsRead
from overlap_spec.messages import Extension, Stats, find
from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.hooks import SchedulerHook


def attach(parts: Parts) -> SchedulerHook | None:
    """Report them, if the worker counts some."""
    layers = find(parts.limits.extensions, ExpertLayers)
    return None if layers is None else ExpertFigures(layers.num_experts)


class ExpertFigures(SchedulerHook):
    """The mean over layers and decode steps since the last report, as far as counts have come."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._reported = self._newest = ExpertsRead(0, 0)
        self._mean: float | None = None

    def message(self, message: Extension) -> bool:
        if not isinstance(message, ExpertsRead):
            return False
        self._newest = message
        return True

    def report(self, stats: Stats) -> Stats:
        layers = self._newest.layers - self._reported.layers
        if layers > 0:
            self._mean = (self._newest.experts - self._reported.experts) / layers
            self._reported = self._newest
        return replace(stats, experts_read=self._mean, num_experts=self._num_experts)

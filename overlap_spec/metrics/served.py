"""What `/metrics` has of the server itself: the engine that it serves, its state, and the answers it has given."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from overlap_spec.messages import EngineHealth, EngineState

PREFIX = "overlap_spec:"


@dataclass(frozen=True)
class Served:
    """Facts of an engine that do not change while it runs."""

    model_name: str = ""
    method: str = ""
    version: str = ""
    max_running_requests: int = 0
    max_queued_requests: int = 0

    def families(self) -> Iterator[Metric]:
        """Limits, and one series with the names as labels, which other series are joined with."""
        names = {"model_name": self.model_name, "method": self.method, "version": self.version}
        info = GaugeMetricFamily(PREFIX + "engine_info", "1; its labels tell what is served.", labels=tuple(names))
        info.add_metric(tuple(names.values()), 1)
        yield info
        yield GaugeMetricFamily(PREFIX + "max_running_reqs", "Slots.", self.max_running_requests)
        limit = "Requests that may wait beyond those that run."
        yield GaugeMetricFamily(PREFIX + "max_queued_reqs", limit, self.max_queued_requests)


def state_families(health: EngineHealth) -> Iterator[Metric]:
    """The engine's state: 1 at the one that it is in, 0 at all others."""
    states = GaugeMetricFamily(PREFIX + "engine_state", "1 if the engine is in this state.", labels=("state",))
    for state in EngineState:
        states.add_metric((state.value,), state is health.state)
    yield states


class Answers:
    """Counts answers by their status; 0 is a client that left before one."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter({200: 0, 503: 0})  # a rate needs a series that has begun

    def add(self, status: int) -> None:
        """Count one."""
        self._counts[status] += 1

    def family(self) -> Metric:
        """The counter."""
        text = "HTTP answers, without those to probes."
        answers = CounterMetricFamily(PREFIX + "http_responses", text, labels=("status",))
        for status, count in sorted(self._counts.items()):
            answers.add_metric((str(status),), count)
        return answers

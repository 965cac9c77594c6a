"""Asks a server for its health and its metrics."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import EngineHealth
from overlap_spec.metrics.prometheus import PREFIX

ASK_S = 15.0  # a server whose engine does not answer takes some seconds for its metrics

Samples = Mapping[str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True)
class Answer:
    """What a server has answered, `at` this time of this machine. Without metrics while it starts."""

    url: str
    health: EngineHealth
    samples: Samples = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)

    @property
    def has_metrics(self) -> bool:
        """Whether there is anything but the state."""
        return bool(self.samples)

    def value(self, name: str) -> float | None:
        """A gauge or a counter without labels; None if there is none of this name."""
        found = self.samples.get(PREFIX + name)
        return found[0][1] if found else None

    def count(self, name: str) -> float:
        """A counter; 0 if there is none of this name."""
        return self.value(f"{name}_total") or 0.0

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values of a metric by one of its labels."""
        return {labels[label]: value for labels, value in self.samples.get(PREFIX + name, ())}

    def labels(self, name: str) -> dict[str, str]:
        """The labels of a metric that has one series; none if there is no such metric."""
        found = self.samples.get(PREFIX + name)
        return found[0][0] if found else {}

    def is_of_another_start(self, before: "Answer") -> bool:
        """Whether the server was started again since: its counters have begun anew."""
        return self.has_metrics and self.count("num_requests") < before.count("num_requests")


class Scraper:
    """Asks one server. `key`: an API key, if it wants one."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=ASK_S)
        except (httpx.InvalidURL, ValueError) as error:
            raise OverlapSpecError(f"--url {url}: {error}") from None

    def ask(self) -> Answer:
        """Raises: OverlapSpecError if it does not answer, or not as this engine does."""
        try:
            health = msgspec.json.decode(self._http.get("/health").content, type=EngineHealth)
            metrics = self._http.get("/metrics")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OverlapSpecError(f"{self._url} cannot be reached: {error or type(error).__name__}") from None
        except msgspec.MsgspecError:
            raise OverlapSpecError(f"{self._url} is no server of this engine: its /health is another") from None
        if metrics.status_code == 401:
            raise OverlapSpecError(f"{self._url} wants an API key: give --api-key-file")
        return Answer(self._url, health, samples_in(metrics.text) if metrics.status_code == 200 else {})


def samples_in(text: str) -> Samples:
    """The samples of `/metrics` by their names, each with its labels."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return samples

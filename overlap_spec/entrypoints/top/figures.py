"""The figures that `overlap-spec top` shows, of a server's health and metrics; `--json` prints them as they are."""

import itertools
import math
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


class Percentiles(msgspec.Struct, frozen=True):
    """Of a latency, in seconds; None if there was none."""

    p50: float | None
    p90: float | None
    p99: float | None


class ClassFigures(msgspec.Struct, frozen=True):
    """Accept lengths of one class of requests: of its last thousand steps, and as usual."""

    accept_length: float
    usual_accept_length: float
    has_collapsed: bool


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One server. A figure that it does not report is None.

    Units: seconds where a name ends in `_s`, shares 0..1. `window_s`: what rates, shares and percentiles are of; None:
    the time since the server's start.
    """

    url: str
    state: str
    reason: str
    actor: str
    since_s: float
    last_sign_s: dict[str, float]
    draft: str
    has_metrics: bool = False  # not while the server starts: then there is nothing below
    window_s: float | None = None
    model: str = ""
    method: str = ""
    version: str = ""
    ranks: int = 1  # that share each layer

    accept_length: float | None = None
    accept_rate: float | None = None
    step_width: float | None = None
    num_steps: float | None = None
    classes: dict[str, ClassFigures] = {}

    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    prefix_hits: float | None = None
    first_token_s: Percentiles = Percentiles(None, None, None)
    inter_token_s: Percentiles = Percentiles(None, None, None)
    request_s: Percentiles = Percentiles(None, None, None)

    num_running: float | None = None
    num_slots: float | None = None
    num_queued: float | None = None
    most_queued: float | None = None
    num_requests: float = 0.0
    num_aborted: float = 0.0
    num_preempted: float = 0.0
    refused: dict[str, float] = {}  # answers by their status, other than 200

    token_usage: float | None = None
    kv_used_tokens: float | None = None
    kv_evictable_tokens: float | None = None
    kv_pool_tokens: float | None = None
    snapshot_bytes: float | None = None  # of recurrent states
    most_snapshot_bytes: float | None = None
    snapshot_lookups: float = 0.0
    snapshot_hits: float = 0.0

    step_time_s: float | None = None
    gpu_gap_s: float | None = None
    host_time_s: float | None = None
    host_time_hidden_s: float | None = None
    step_efficiency: float | None = None
    experts_read: float | None = None
    num_experts: float | None = None

    adapt_versions: float | None = None
    adapt_gain: float | None = None

    recoveries: float = 0.0
    replayed: float = 0.0
    poisonous: float = 0.0
    last_recovery_s: float | None = None
    audit_tokens: float = 0.0
    audit_near_ties: float = 0.0
    audit_faults: float = 0.0


def figures_of(answer: Answer, before: Answer | None = None) -> Figures:
    """What an answer reports. `before`: an earlier one, which rates count from; None: from the server's start."""
    health = answer.health
    state = Figures(
        url=answer.url,
        state=health.state.value,
        reason=health.reason,
        actor=health.actor,
        since_s=health.since_s,
        last_sign_s=health.last_sign_s,
        draft=health.draft.value,
    )
    if not answer.has_metrics:
        return state
    served = answer.labels("engine_info")
    return msgspec.structs.replace(
        state,
        has_metrics=True,
        window_s=None if before is None else answer.at - before.at,
        model=served.get("model_name", ""),
        method=served.get("method", ""),
        version=served.get("version", ""),
        ranks=int(served.get("ranks", 1)),
        classes=_classes(answer),
        refused={
            status: n for status, n in answer.by("http_responses_total", "status").items() if status != "200" and n
        },
        **{name: answer.value(metric) for name, metric in GAUGES.items()},
        **{name: answer.count(metric) for name, metric in COUNTERS.items()},
        **{name: percentiles(answer, before, metric) for name, metric in HISTOGRAMS.items()},
        **_rates(answer, before),
    )


GAUGES = {  # field -> metric
    "accept_length": "spec_accept_length",
    "accept_rate": "spec_accept_rate",
    "step_width": "spec_num_draft_tokens",
    "num_steps": "spec_num_steps",
    "tokens_per_s": "gen_throughput",
    "num_running": "num_running_reqs",
    "num_slots": "max_running_reqs",
    "num_queued": "num_queue_reqs",
    "most_queued": "max_queued_reqs",
    "token_usage": "token_usage",
    "kv_used_tokens": "num_used_tokens",
    "kv_evictable_tokens": "kv_evictable_tokens",
    "kv_pool_tokens": "max_total_num_tokens",
    "snapshot_bytes": "state_snapshot_bytes",
    "most_snapshot_bytes": "state_snapshot_max_bytes",
    "step_time_s": "step_time_seconds",
    "gpu_gap_s": "gpu_gap_seconds",
    "host_time_s": "host_time_seconds",
    "host_time_hidden_s": "host_time_hidden_seconds",
    "step_efficiency": "step_efficiency",
    "experts_read": "experts_read",
    "num_experts": "num_experts",
    "adapt_versions": "adapt_versions_total",
    "adapt_gain": "adapt_gain",
    "last_recovery_s": "last_recovery_seconds",
}
COUNTERS = {
    "num_requests": "num_requests",
    "num_aborted": "num_aborted_requests",
    "num_preempted": "num_retracted_requests",
    "snapshot_lookups": "state_snapshot_lookups",
    "snapshot_hits": "state_snapshot_hits",
    "recoveries": "recoveries",
    "replayed": "replayed_requests",
    "poisonous": "poisonous_requests",
    "audit_tokens": "audit_tokens",
    "audit_near_ties": "audit_near_ties",
    "audit_faults": "audit_faults",
}
HISTOGRAMS = {
    "first_token_s": "time_to_first_token_seconds",
    "inter_token_s": "inter_token_latency_seconds",
    "request_s": "e2e_request_latency_seconds",
}


def _classes(answer: Answer) -> dict[str, ClassFigures]:
    usual = answer.by("spec_class_usual_accept_length", "class")
    bad = answer.by("spec_draft_collapsed", "class")
    newest = answer.by("spec_class_accept_length", "class")
    return {name: ClassFigures(length, usual.get(name, 0.0), bool(bad.get(name))) for name, length in newest.items()}


def _refused(answer: Answer) -> dict[str, float]:
    counts = answer.by("http_responses_total", "status")
    return {status: count for status, count in counts.items() if status != "200" and count}


def _rates(answer: Answer, before: Answer | None) -> dict[str, float | None]:
    """Prompt tokens a second, which a first answer cannot tell, and the share of them that the prefix cache had."""
    prompt, cached = (_since(answer, before, name) for name in ("prompt_tokens", "cached_tokens"))
    return {
        "prompt_tokens_per_s": None if before is None else prompt / max(answer.at - before.at, 1e-3),
        "prefix_hits": cached / prompt if prompt > 0 else None,
    }


def _since(answer: Answer, before: Answer | None, name: str) -> float:
    return answer.count(name) - (0.0 if before is None else before.count(name))


def percentiles(answer: Answer, before: Answer | None, histogram: str) -> Percentiles:
    """Of what a histogram has counted between two answers."""
    name = f"{histogram}_bucket"
    start = {} if before is None else before.by(name, "le")
    counts = [(float(le), count - start.get(le, 0.0)) for le, count in answer.by(name, "le").items()]
    return Percentiles(*(quantile(counts, of) for of in (0.5, 0.9, 0.99)))


def quantile(buckets: list[tuple[float, float]], of: float) -> float | None:
    """Prometheus' estimate: linear within the bucket; above the last bound, that bound.

    `buckets`: upper bounds, ascending, the last of them infinite, with cumulative counts.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = of * buckets[-1][1]
    for (lower, below), (upper, count) in itertools.pairwise([(0.0, 0.0), *buckets]):
        if count >= rank and count > below:
            return lower if math.isinf(upper) else lower + (upper - lower) * (rank - below) / (count - below)
    return None

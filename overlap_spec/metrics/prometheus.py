"""The metrics of `/metrics` in Prometheus' format: the engine's `Stats`, and what the HTTP server knows itself.

That is the engine it serves, the engine's state, latencies that it has seen, and the answers it has given.

Names after `overlap_spec:` are SGLang's, and so are the histograms' bounds, roughly; the four `vllm:spec_decode_*`
counters are those that `vllm bench serve` reads before and after a run.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from overlap_spec.messages import READY, AdaptFigures, AuditFigures, DraftState, EngineHealth, EngineState, Stats

PREFIX = "overlap_spec:"


@dataclass(frozen=True)
class Served:
    """Facts of an engine that do not change while it runs."""

    model_name: str = ""
    method: str = ""
    version: str = ""
    max_running_requests: int = 0
    max_queued_requests: int = 0
    ranks: int = 1

    def families(self) -> Iterator[Metric]:
        """Limits, and one series with the names as labels, which other series are joined with."""
        names = {"model_name": self.model_name, "method": self.method, "version": self.version}
        names["ranks"] = str(self.ranks)
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
        self._counts[status] += 1

    def family(self) -> Metric:
        text = "HTTP answers, without those to probes."
        answers = CounterMetricFamily(PREFIX + "http_responses", text, labels=("status",))
        for status, count in sorted(self._counts.items()):
            answers.add_metric((str(status),), count)
        return answers


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 8.0, 20.0, 60.0, 200.0, 400.0)
ITL_BOUNDS_S = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04),
    *(0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 8.0),
)
E2E_BOUNDS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 100.0, 200.0, 600.0, 1200.0, 2400.0)

# A gauge without a value (None) is left out.
GAUGES: tuple[tuple[str, str, Callable[[Stats], float | None]], ...] = (
    ("num_running_reqs", "Requests that hold a slot.", lambda s: s.num_running),
    ("num_queue_reqs", "Requests that wait for a slot.", lambda s: s.num_queued),
    ("token_usage", "Share of the KV pool held by running requests, 0..1.", lambda s: s.token_usage),
    ("num_used_tokens", "Tokens of the KV pool held by running requests.", lambda s: s.num_used_tokens),
    ("kv_evictable_tokens", "Tokens held by the prefix cache alone.", lambda s: s.num_cached_tokens),
    ("max_total_num_tokens", "Tokens the KV pool can hold.", lambda s: s.max_total_tokens),
    ("gen_throughput", "Generated tokens per second, last interval.", lambda s: s.gen_throughput),
    (
        "spec_accept_length",
        "Committed tokens per verify step, bonus included, last interval.",
        lambda s: s.accept_length,
    ),
    ("spec_accept_rate", "Guesses accepted of those verified, last interval.", lambda s: s.accept_rate),
    ("spec_num_steps", "Guesses in a row that the last decode step could verify.", lambda s: s.num_steps),
    ("spec_num_draft_tokens", "Columns of the last decode step's windows, root included.", lambda s: s.step_width),
    ("spec_draft_dead", "1 if hardly any of the draft's last guesses was accepted.", lambda s: s.draft_is_dead),
    ("step_time_seconds", "Mean time that the device worked on a step, last interval.", lambda s: s.step_time),
    (
        "step_efficiency",
        "Time that decode steps must take at the device's ceilings over the time they took, last interval.",
        lambda s: s.step_efficiency,
    ),
    (
        "experts_read",
        "Distinct experts that a layer reads in a decode step, mean, last interval; not of dense targets.",
        lambda s: s.experts_read,
    ),
    (
        "num_experts",
        "Experts of a layer, of which some are read; not of dense targets.",
        lambda s: s.num_experts or None,
    ),
    (
        "state_snapshot_bytes",
        "Bytes of the snapshots of recurrent states that the prefix cache has; not of other targets.",
        lambda s: s.snapshot_bytes if s.max_snapshot_bytes else None,
    ),
    (
        "state_snapshot_max_bytes",
        "Bytes of all snapshots that there is room for.",
        lambda s: s.max_snapshot_bytes or None,
    ),
    ("last_recovery_seconds", "What the last recovery of the pair took; 0 before it.", lambda s: s.last_recovery),
    ("gpu_gap_seconds", "Mean time that the device waited for a step, last interval.", lambda s: s.gpu_gap),
    ("host_time_seconds", "Mean time to schedule and launch a step, last interval.", lambda s: s.host_time),
    (
        "host_time_hidden_seconds",
        "What of it the device did not wait for, mean, last interval.",
        lambda s: s.host_time_hidden,
    ),
)
COUNTERS: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens of admitted requests.", lambda s: s.prompt_tokens_total),
    ("generation_tokens", "Tokens that requests were given.", lambda s: s.generation_tokens_total),
    ("cached_tokens", "Prompt tokens found in the prefix cache.", lambda s: s.cached_tokens_total),
    (
        "state_snapshot_lookups",
        "Requests that began with a slot, where recurrent states have snapshots.",
        lambda s: s.snapshot_lookups_total,
    ),
    ("state_snapshot_hits", "Of these, those that went on from a snapshot.", lambda s: s.snapshot_hits_total),
    ("num_requests", "Requests received.", lambda s: s.requests_total),
    ("num_aborted_requests", "Requests ended before they finished.", lambda s: s.aborted_total),
    (
        "num_not_finite_requests",
        "Requests ended because the logits were NaN or infinite.",
        lambda s: s.not_finite_total,
    ),
    ("num_retracted_requests", "Preemptions.", lambda s: s.preempted_total),
    ("recomputed_tokens", "Output that one order of sums computed again.", lambda s: s.recomputed_tokens_total),
    ("spec_draft_updates", "Heads that were written over the draft by hand.", lambda s: s.draft_updates_total),
    ("spec_verify_calls", "Verify steps, one per request and decode step.", lambda s: s.verify_steps_total),
    ("steps", "Steps of the engine.", lambda s: s.steps_total),
    ("decode_steps", "Decode steps of the engine.", lambda s: s.decode_steps_total),
    (
        "decode_floor_seconds",
        "Time that decode steps must take at the device's ceilings; 0 where they are not known.",
        lambda s: s.decode_floor_total,
    ),
    ("decode_time_seconds", "Time of decode steps, with the gaps before them.", lambda s: s.decode_time_total),
    ("recoveries", "Deaths after which processes of the engine were started again.", lambda s: s.recoveries_total),
    ("replayed_requests", "Open requests that went on after one, each time.", lambda s: s.replayed_total),
    ("poisonous_requests", "Requests ended because the worker died with them twice.", lambda s: s.poisonous_total),
)
UNSHARED = "Prompt tokens that another client had sent before, and that isolated clients do not share."


class RequestTimer:
    """Times one request. Nothing is counted for a request that gets no token."""

    def __init__(self, metrics: "ServerMetrics") -> None:
        self._metrics = metrics
        self._started = self._last = time.perf_counter()
        self._seen_token = False

    def tokens(self, count: int) -> None:
        """Note that `count` tokens have arrived together."""
        if count == 0:
            return
        now = time.perf_counter()
        interval, self._last = now - self._last, now
        if self._seen_token:
            self._metrics.inter_token.observe(interval / count, count)
        else:
            self._seen_token = True
            self._metrics.first_token.observe(interval)

    def finished(self) -> None:
        """Note that the request's last token has arrived."""
        if self._seen_token:
            self._metrics.whole_request.observe(time.perf_counter() - self._started)


class ServerMetrics(Collector):
    """One server's metrics, in a registry of their own."""

    def __init__(self, served: Served | None = None) -> None:
        self.answers = Answers()
        self.first_token = WeightedHistogram(TTFT_BOUNDS_S)
        self.inter_token = WeightedHistogram(ITL_BOUNDS_S)
        self.whole_request = WeightedHistogram(E2E_BOUNDS_S)
        self._stats = Stats()
        self._audit: AuditFigures | None = None
        self._served = served or Served()
        self._health, self._for_operator = READY, False
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def start_request(self) -> RequestTimer:
        return RequestTimer(self)

    def update(self, stats: Stats, audit: AuditFigures | None = None) -> None:
        """Take the engine's newest figures."""
        self._stats, self._audit = stats, audit

    def render(self, health: EngineHealth = READY, for_operator: bool = False) -> bytes:
        self._health, self._for_operator = health, for_operator
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield from self._served.families()
        yield from state_families(self._health)
        yield self.answers.family()
        for name, text, gauge in GAUGES:
            if (value := gauge(self._stats)) is not None:
                yield GaugeMetricFamily(PREFIX + name, text, value)
        for name, text, counter in COUNTERS:
            yield CounterMetricFamily(PREFIX + name, text, counter(self._stats))
        if self._for_operator:
            total = self._stats.unshared_tokens_total
            yield CounterMetricFamily(PREFIX + "unshared_tokens", UNSHARED, total)
        yield from _draft(self._stats)
        yield from () if self._stats.adapt is None else _adapt(self._stats.adapt)
        yield from _heartbeats(self._health.last_sign_s)
        yield from self._latencies()
        yield from _audit(self._audit) if self._audit is not None else ()
        yield from _spec_decode(self._stats)

    def _latencies(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.first_token),
            ("inter_token_latency_seconds", "Between tokens; k that came together count k times.", self.inter_token),
            ("e2e_request_latency_seconds", "From arrival to the last token.", self.whole_request),
        ):
            yield HistogramMetricFamily(PREFIX + name, text, histogram.buckets(), histogram.total)


def _draft(stats: Stats) -> Iterator[Metric]:
    """The draft, by class of requests."""
    usual = GaugeMetricFamily(
        PREFIX + "spec_class_usual_accept_length", "Accept length over many thousand steps.", labels=("class",)
    )
    newest = GaugeMetricFamily(
        PREFIX + "spec_class_accept_length", "Accept length of the last thousand steps.", labels=("class",)
    )
    bad = GaugeMetricFamily(
        PREFIX + "spec_draft_collapsed", "1 if first guesses are right half as often as usual.", labels=("class",)
    )
    for name, figures in stats.draft_classes.items():
        newest.add_metric((name,), figures.accept_length)
        usual.add_metric((name,), figures.usual_accept_length)
        bad.add_metric((name,), figures.state in (DraftState.COLLAPSED, DraftState.DEAD))
    yield from (newest, usual, bad) if stats.draft_classes else ()


def _adapt(figures: AdaptFigures) -> Iterator[Metric]:
    """Of a draft that learns while it serves."""
    for name, text, count in (
        ("versions", "Heads that have taken over, each better on requests that it had not seen.", figures.versions),
        ("dropped", "Of these, heads that were dropped because live accept length fell.", figures.dropped),
        ("refused", "Heads that were refused because they had NaN.", figures.refused),
        ("train_steps", "Steps of training.", figures.steps),
        ("seconds", "Time of the device that learning has taken.", figures.seconds),
    ):
        yield CounterMetricFamily(f"{PREFIX}adapt_{name}", text, count)
    for name, text, value in (
        ("samples", "Requests in the ring, which are learnt from.", figures.samples),
        (
            "live_accept_length",
            "The draft's at the last judgement, on requests that were not learnt.",
            figures.live_length,
        ),
        ("copy_accept_length", "That of the copy that learns.", figures.copy_length),
        ("gain", "By how much the last head that took over was better, in accept length.", figures.gain),
    ):
        yield GaugeMetricFamily(f"{PREFIX}adapt_{name}", text, value)


def _audit(figures: AuditFigures) -> Iterator[Metric]:
    """The live audit's; two rates of differences are comparable: near-ties, and control differences."""
    for name, text, count in (
        ("requests", "Requests that plain decoding has run again.", figures.requests),
        ("tokens", "Tokens of those.", figures.tokens),
        ("near_ties", "Served tokens that plain decoding does not draw, within the noise.", figures.near_ties),
        ("faults", "Served tokens that plain decoding does not draw, beyond the noise.", figures.faults),
        ("control_tokens", "Tokens that plain decoding drew in batches of two sizes.", figures.control_tokens),
        ("control_differences", "Tokens that differed between the two.", figures.control_differences),
        ("dropped", "Requests that were chosen and not audited.", figures.dropped),
    ):
        yield CounterMetricFamily(f"{PREFIX}audit_{name}", text, count)
    yield GaugeMetricFamily(PREFIX + "audit_backlog", "Requests that are to be audited.", figures.backlog)
    yield GaugeMetricFamily(PREFIX + "audit_noise_bound", "Margins up to it are noise, in logits.", figures.bound)
    speculating = "0 once a fault has switched speculation off."
    yield GaugeMetricFamily(PREFIX + "audit_speculating", speculating, figures.speculating)


def _heartbeats(last_sign_s: Mapping[str, float]) -> Iterator[Metric]:
    if last_sign_s:
        text = "Seconds since a process of the engine sent its last heartbeat."
        ages = GaugeMetricFamily(PREFIX + "last_sign_seconds", text, labels=("process",))
        for process, seconds in last_sign_s.items():
            ages.add_metric((process,), seconds)
        yield ages


def _spec_decode(stats: Stats) -> Iterator[Metric]:
    """vLLM's counters. There a draft is a verify step with guesses, and the bonus is not an accepted token."""
    per_position = stats.accepted_per_position_total
    prefix = "vllm:spec_decode_num_"
    yield CounterMetricFamily(prefix + "drafts", "Verify steps with guesses.", stats.drafts_total)
    yield CounterMetricFamily(prefix + "draft_tokens", "Guesses verified.", stats.proposed_tokens_total)
    yield CounterMetricFamily(prefix + "accepted_tokens", "Guesses accepted.", sum(per_position))
    positions = CounterMetricFamily(
        prefix + "accepted_tokens_per_pos", "Guesses accepted, by position from 0.", labels=("position",)
    )
    for position, accepted in enumerate(per_position):
        positions.add_metric((str(position),), accepted)
    yield positions


class WeightedHistogram:
    """Counts by upper bound. `bounds` ascend, in the unit of what is observed; above the last one is +Inf.

    It counts one value many times at once, which prometheus-client's own cannot: a chunk of k tokens is k inter-token
    latencies.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self.newest = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count `value` `weight` times."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight
        self.newest = value

    @property
    def total(self) -> float:
        """Sum of all that was observed."""
        return self._sum

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and cumulative count, as the text format wants them."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))

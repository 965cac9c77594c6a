"""Writes `dashboard.json` from the table of panels below: `python deploy/grafana/make_dashboard.py`.

A panel is a row's cell: title, unit, and its series, each an expression and a legend. Expressions are written without
the selection of servers: `gauge`, `rate` and `quantile` add `{instance=~"$instance"}`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("dashboard.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID, HEIGHT = 24, 7  # columns of Grafana's grid; rows of it that a panel is high
RATES = "$__rate_interval"

Json = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """One query of a panel."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel. `about` is shown at its corner; `most` is the upper end of its axis."""

    title: str
    unit: str
    series: tuple[Series, ...]
    about: str = ""
    most: float | None = None
    kind: str = "timeseries"
    names: dict[str, str] | None = None  # by value, what a stat shows in its place


def selector(name: str, labels: str = "") -> str:
    """A metric of the chosen servers."""
    prefix = "" if ":" in name else "overlap_spec:"
    return f'{prefix}{name}{{instance=~"$instance"{", " + labels if labels else ""}}}'


def gauge(name: str, legend: str, labels: str = "") -> Series:
    """A gauge, one line for each server."""
    return Series(selector(name, labels), legend)


def rate(name: str, legend: str, labels: str = "") -> Series:
    """A counter, a second."""
    return Series(f"rate({selector(name, labels)}[{RATES}])", legend)


def share(part: str, whole: str, legend: str, scale: int = 1) -> Series:
    """One counter over another, both a second."""
    times = f"{scale} * " if scale > 1 else ""
    return Series(f"{times}rate({selector(part)}[{RATES}]) / rate({selector(whole)}[{RATES}])", legend)


def quantile(name: str, of: float) -> Series:
    """A quantile of a histogram, over all chosen servers."""
    buckets = f"sum by (le) (rate({selector(name + '_bucket')}[{RATES}]))"
    return Series(f"histogram_quantile({of}, {buckets})", f"p{of * 100:g}")


def quantiles(name: str) -> tuple[Series, ...]:
    """Three of them."""
    return tuple(quantile(name, of) for of in (0.5, 0.9, 0.99))


def by_method(name: str, legend: str) -> Series:
    """A gauge with the method as one more label."""
    return Series(f"{selector(name)} * on (job, instance) group_left (method) {selector('engine_info')}", legend)


ONE = "{{instance}}"
ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Panel(
            "Ready", "none", (gauge("engine_state", ONE, 'state="ready"'),), kind="stat", names={"0": "no", "1": "yes"}
        ),
        Panel("Generated tokens a second", "short", (gauge("gen_throughput", ONE),), kind="stat"),
        Panel("Accept length", "short", (by_method("spec_accept_length", "{{method}} {{instance}}"),), kind="stat"),
        Panel("First token, p99", "s", (quantile("time_to_first_token_seconds", 0.99),), kind="stat"),
        Panel("Waiting requests", "short", (gauge("num_queue_reqs", ONE),), kind="stat"),
        Panel("KV pool in use", "percentunit", (gauge("token_usage", ONE),), kind="stat"),
    ),
    "Speculation": (
        Panel(
            "Accept length by method",
            "short",
            (by_method("spec_accept_length", "{{method}} {{instance}}"),),
            "Committed tokens per verify step, the bonus included, of about the last second.",
        ),
        Panel(
            "Accept length by class of requests",
            "short",
            (
                by_method("spec_class_accept_length", "{{method}} {{class}}, last thousand steps"),
                by_method("spec_class_usual_accept_length", "{{method}} {{class}}, usual"),
            ),
            "Only of classes that have had enough guesses to be judged.",
        ),
        Panel(
            "Guesses accepted, by position",
            "percentunit",
            (
                Series(
                    f"rate({selector('vllm:spec_decode_num_accepted_tokens_per_pos_total')}[{RATES}])"
                    " / on (job, instance) group_left ()"
                    f" rate({selector('vllm:spec_decode_num_drafts_total')}[{RATES}])",
                    "position {{position}}",
                ),
                gauge("spec_accept_rate", "all guesses"),
            ),
            "Share of verify steps with guesses in which the guess at this position was accepted.",
            most=1,
        ),
        Panel(
            "Width of a step",
            "short",
            (
                gauge("spec_num_draft_tokens", "columns, the root included"),
                gauge("spec_num_steps", "guesses in a row"),
            ),
            "Of the last decode step. 1 column is plain decoding.",
        ),
        Panel(
            "Health of the draft",
            "short",
            (gauge("spec_draft_dead", "dead"), gauge("spec_draft_collapsed", "collapsed, {{class}}")),
            "1: hardly any guess is right; first guesses are right less than half as often as usual.",
            most=1,
        ),
    ),
    "Latency": (
        Panel("First token", "s", quantiles("time_to_first_token_seconds")),
        Panel("Between tokens", "s", quantiles("inter_token_latency_seconds"), "Tokens that come together count each."),
        Panel("Whole request", "s", quantiles("e2e_request_latency_seconds")),
    ),
    "Load": (
        Panel(
            "Tokens a second",
            "short",
            (
                rate("generation_tokens_total", "generated"),
                rate("prompt_tokens_total", "of prompts"),
                rate("cached_tokens_total", "of prompts, found in the prefix cache"),
            ),
        ),
        Panel(
            "Slots and queue",
            "short",
            (
                gauge("num_running_reqs", "running"),
                gauge("max_running_reqs", "slots"),
                gauge("num_queue_reqs", "waiting"),
                gauge("max_queued_reqs", "most that may wait"),
            ),
        ),
        Panel(
            "KV pool, in tokens",
            "short",
            (
                gauge("num_used_tokens", "running requests"),
                gauge("kv_evictable_tokens", "prefix cache alone"),
                gauge("max_total_num_tokens", "size of the pool"),
            ),
        ),
        Panel(
            "Prefix hits",
            "percentunit",
            (share("cached_tokens_total", "prompt_tokens_total", "share of prompt tokens"),),
            most=1,
        ),
        Panel(
            "Requests a second",
            "reqps",
            (
                rate("num_requests_total", "received"),
                rate("num_aborted_requests_total", "ended early"),
                rate("num_retracted_requests_total", "preempted"),
                rate("num_not_finite_requests_total", "logits not finite"),
            ),
        ),
        Panel(
            "Refusals a second, by status",
            "reqps",
            (rate("http_responses_total", "{{status}}", 'status!="200"'),),
            "400: wrong; 401, 403: keys; 499: the client left; 503: queue full or not ready; 504: out of time.",
        ),
    ),
    "Steps": (
        Panel(
            "A step and its parts",
            "s",
            (
                gauge("step_time_seconds", "device works"),
                gauge("gpu_gap_seconds", "device waits"),
                gauge("host_time_seconds", "host: schedule and launch"),
                gauge("host_time_hidden_seconds", "of that, hidden behind the device"),
            ),
            "Means over about the last second.",
        ),
        Panel(
            "Step efficiency",
            "percentunit",
            (
                gauge("step_efficiency", "last interval"),
                share("decode_floor_seconds_total", "decode_time_seconds_total", "mean"),
            ),
            "Time that decode steps must take at the device's ceilings over the time they took. Empty, or 0, where"
            " the ceilings of the device are not known.",
            most=1,
        ),
        Panel(
            "Steps a second",
            "ops",
            (
                rate("steps_total", "all"),
                rate("decode_steps_total", "decode"),
                rate("spec_verify_calls_total", "decode, one per request"),
            ),
        ),
    ),
    "Faults": (
        Panel(
            "Recoveries",
            "short",
            (
                gauge("recoveries_total", "times that scheduler and worker were started again"),
                gauge("replayed_requests_total", "requests that went on"),
                gauge("poisonous_requests_total", "requests that were ended for it"),
            ),
        ),
        Panel("Last recovery", "s", (gauge("last_recovery_seconds", ONE),)),
        Panel(
            "Seconds since a heartbeat", "s", (gauge("last_sign_seconds", "{{process}}"),), "Below 5 if all is well."
        ),
        Panel(
            "Audit: differences per 10,000 tokens",
            "short",
            (
                share("audit_near_ties_total", "audit_tokens_total", "near-ties", 10_000),
                share(
                    "audit_control_differences_total",
                    "audit_control_tokens_total",
                    "plain decoding against itself",
                    10_000,
                ),
            ),
            "Both lines are the noise of batch shapes, and should be alike.",
        ),
        Panel(
            "Audit: faults",
            "short",
            (
                gauge("audit_faults_total", "tokens that plain decoding would not have drawn"),
                gauge("audit_speculating", "1: it still speculates"),
            ),
        ),
        Panel(
            "Audit: requests",
            "short",
            (
                rate("audit_requests_total", "audited a second"),
                rate("audit_dropped_total", "dropped a second"),
                gauge("audit_backlog", "waiting"),
            ),
        ),
    ),
}


def dashboard() -> Json:
    """Grafana's JSON."""
    panels = list(_placed())
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    return {
        "uid": "overlap-spec",
        "title": "overlap-spec",
        "tags": ["llm", "speculative decoding"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource(), _instances()]},
        "panels": panels,
    }


def _placed() -> Iterator[Json]:
    """Titles of rows and their panels, from the top left to the bottom right."""
    top = 0
    for title, panels in ROWS.items():
        yield {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(0, top, GRID, 1)}
        top += 1
        for line in _lines(panels):
            widths = [GRID // len(line)] * len(line)
            height = 4 if line[0].kind == "stat" else HEIGHT
            for panel, left, width in zip(line, accumulate([0, *widths]), widths, strict=False):
                yield _panel(panel) | {"gridPos": _place(left, top, width, height)}
            top += height


def _lines(panels: tuple[Panel, ...]) -> list[tuple[Panel, ...]]:
    """At most three graphs, or six numbers, beside each other."""
    most = 6 if panels[0].kind == "stat" else 3
    return [panels[start : start + most] for start in range(0, len(panels), most)]


def _place(left: int, top: int, width: int, height: int) -> Json:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.names is not None:
        defaults["mappings"] = [
            {"type": "value", "options": {value: {"text": text} for value, text in panel.names.items()}}
        ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {} if panel.kind == "stat" else {"tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": each.expression, "legendFormat": each.legend}
            for place, each in enumerate(panel.series)
        ],
    }


def _datasource() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _instances() -> Json:
    query = "label_values(overlap_spec:engine_info, instance)"
    return {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "instances"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def text() -> str:
    """What the file holds."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())

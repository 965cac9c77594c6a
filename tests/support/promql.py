"""Queries of dashboards and alert rules, and what is wrong with one, given the text of `/metrics`."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboard.json"
RULES = DEPLOY / "prometheus/alerts.yml"
SCRAPED = frozenset({"job", "instance"})  # labels that Prometheus adds

Names = dict[str, dict[str, set[str]]]  # of series: the values of each of their labels


@dataclass(frozen=True)
class Query:
    """One expression, and what it shows: text with labels in it, `{{label}}` or `{{ $labels.label }}`."""

    where: str
    expression: str
    shown: str = ""


def dashboard_queries() -> Iterator[Query]:
    """Every query of every panel, with Grafana's variables replaced."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
            yield Query(f"{panel['title']}, {target['refId']}", text, target["legendFormat"])


def alerts() -> list[dict[str, Any]]:
    """Every alert rule."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def alert_queries() -> Iterator[Query]:
    """Every expression of a rule."""
    for rule in alerts():
        yield Query(rule["alert"], rule["expr"], " ".join(rule["annotations"].values()))


def names_in(text: str) -> Names:
    """The series of `/metrics`, and `up`, which Prometheus adds."""
    names: Names = {"up": {}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = names.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return names


@dataclass
class Used:
    """What a query asks for: series with the labels that choose among them, and labels that it groups and joins by."""

    series: list[tuple[str, list[promql.Matcher]]] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)

    def visit(self, node: promql.Expr) -> bool:
        """Called for each node."""
        match node:
            case promql.VectorSelector():
                self.series.append((node.name or "", list(node.matchers.matchers)))
            case promql.AggregateExpr() if node.modifier is not None:
                self.labels |= set(node.modifier.labels)
            case promql.BinaryExpr() if node.modifier is not None:
                matching = node.modifier.matching
                self.labels |= {*(matching.labels if matching else ()), *(node.modifier.group_labels or ())}
        return True


def used_by(query: Query) -> Used:
    """What a query asks for. Raises: ValueError if it is no PromQL."""
    used = Used()
    promql.walk(promql.parse(query.expression), used.visit)
    used.labels |= set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", query.shown))
    return used


def mistakes(queries: Iterable[Query], names: Names) -> list[str]:
    """One line for each series, label or value of a label that is not there."""
    return [f"{query.where}: {wrong}" for query in queries for wrong in _wrong(used_by(query), names)]


def _wrong(used: Used, names: Names) -> Iterator[str]:
    known = set(SCRAPED)
    for name, matchers in used.series:
        if name not in names:
            yield f"there is no {name}"
            continue
        known |= names[name].keys()
        for matcher in matchers:
            if matcher.name in SCRAPED:
                continue
            values = names[name].get(matcher.name, set())
            if not values:
                yield f"{name} has no label {matcher.name}"
            elif matcher.op == promql.MatchOp.Equal and matcher.value not in values:
                yield f"{matcher.name} of {name} is never {matcher.value}"
    if used.series and not any(name not in names for name, _ in used.series):
        yield from (f"no label {label}" for label in sorted(used.labels - known))

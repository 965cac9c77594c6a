"""The dashboard and the alert rules in `deploy/` ask for what `/metrics` has: names, labels and their values."""

import asyncio
import runpy
from pathlib import Path

import httpx
import pytest
from support.fake_engine_client import INFO, FakeClient
from support.promql import DEPLOY, Names, Query, alert_queries, alerts, dashboard_queries, mistakes, names_in, used_by

from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.messages import DraftFigures, DraftState, EngineHealth, EngineState, Stats
from overlap_spec.runtime.actor import ROLES

DOCUMENT = Path(__file__).parents[2] / "docs/operating.md"
QUERIES = [*dashboard_queries(), *alert_queries()]
EVERYTHING = Stats(
    step_efficiency=0.5,
    experts_read=41.5,
    num_experts=128,
    snapshot_bytes=1,
    max_snapshot_bytes=2,
    accepted_per_position_total=(3, 2, 1),
    draft_classes={name: DraftFigures(DraftState.HEALTHY, 2.0, 2.0) for name in ("greedy", "sampled")},
)


def everything() -> EngineHealth:
    return EngineHealth(EngineState.READY, last_sign_s=dict.fromkeys(ROLES, 0.5))


@pytest.fixture(scope="module")
def names() -> Names:
    """What the server's `/metrics` has if no figure is missing."""

    async def inner() -> str:
        transport = httpx.ASGITransport(create_app(FakeClient(statistics=EVERYTHING), INFO, everything))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return (await http.get("/metrics")).text

    return names_in(asyncio.run(inner()))


def test_all_that_is_asked_for_is_there(names: Names) -> None:
    assert len(QUERIES) > 60
    assert mistakes(QUERIES, names) == []


def test_a_metric_that_is_renamed_is_noticed(names: Names) -> None:
    used = {name for query in QUERIES for name, _ in used_by(query).series}
    assert len(used) > 40
    for name in used:
        renamed = {f"{name}_new" if each == name else each: labels for each, labels in names.items()}
        assert [line for line in mistakes(QUERIES, renamed) if f"there is no {name}" in line], name


@pytest.mark.parametrize(
    ("expression", "shown", "wrong"),
    [
        ('overlap_spec:engine_state{state="redy"}', "", "state of overlap_spec:engine_state is never redy"),
        ('overlap_spec:engine_state{stat="ready"}', "", "overlap_spec:engine_state has no label stat"),
        ("sum by (clas) (overlap_spec:spec_draft_collapsed)", "", "no label clas"),
        ("overlap_spec:last_sign_seconds", "{{proces}}", "no label proces"),
        ("overlap_spec:last_sign_seconds > 10", "the {{ $labels.proces }}", "no label proces"),
        ("rate(overlap_spec:steps[1m])", "", "there is no overlap_spec:steps"),
    ],
)
def test_a_mistake_is_noticed(expression: str, shown: str, wrong: str, names: Names) -> None:
    assert mistakes([Query("here", expression, shown)], names) == [f"here: {wrong}"]


def test_what_does_not_parse_is_noticed(names: Names) -> None:
    with pytest.raises(ValueError, match="unclosed|unexpected|invalid"):
        mistakes([Query("here", "rate(overlap_spec:steps_total[1m]")], names)


def test_the_dashboard_is_what_its_table_says() -> None:
    made = runpy.run_path(str(DEPLOY / "grafana/make_dashboard.py"))
    assert made["FILE"].read_text() == made["text"](), "run: python deploy/grafana/make_dashboard.py"


def test_every_alert_has_its_section() -> None:
    headings = [line.lstrip("# ") for line in DOCUMENT.read_text().splitlines() if line.startswith("#")]
    anchors = {heading.lower().replace(":", "").replace(" ", "-") for heading in headings}
    for rule in alerts():
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert file == "docs/operating.md" and anchor in anchors, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]


def test_every_alert_is_named_in_its_section() -> None:
    text = DOCUMENT.read_text()
    assert {rule["alert"] for rule in alerts() if f"`{rule['alert']}`" not in text} == set()

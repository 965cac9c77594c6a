"""How old the results are that documents show."""

from pathlib import Path
from typing import Any

import pytest
from documents.age import ages, changed_parts, commits_of
from documents.figures import shown

from overlap_spec.runtime.source import PARTS, Source

ROOT = Path(__file__).parent.parent.parent.parent
NOW = Source("abc", {}, {part: "new" for part in PARTS})


def report(benchmark: str, **code: str) -> dict[str, Any]:
    hashes = {part: code.get(part.rpartition("/")[2], "new") for part in PARTS}
    return {"benchmark": benchmark, "run": {"source": {"trees": {}, "code": hashes}}}


@pytest.mark.parametrize(
    ("benchmark", "part", "is_old"),
    [
        ("latency", "worker", True),
        ("latency", "entrypoints", False),
        ("throughput", "entrypoints", True),
        ("throughput", "overlap_spec_kernels", True),
        ("kernels", "overlap_spec_kernels", True),
        ("kernels", "worker", False),
    ],
)
def test_a_result_is_old_once_the_code_it_depends_on_has_changed(benchmark: str, part: str, is_old: bool) -> None:
    assert changed_parts(report(benchmark), NOW) == []
    found = changed_parts(report(benchmark, **{part: "old"}), NOW)
    assert [name.rpartition("/")[2] for name in found] == ([part] if is_old else [])


def test_a_result_that_recorded_no_code_is_old() -> None:
    assert changed_parts({"benchmark": "kernels", "commit": "abc"}, NOW) == ["kernels/overlap_spec_kernels"]


def test_results_have_commits_and_old_ones_are_listed_with_what_has_changed(tmp_path: Path) -> None:
    old, new = report("latency", worker="old", speculative="old"), report("latency")
    old["run"] |= {"when": "2026-11-20", "commit": "bbbbbbbbbbbb+"}
    new["run"] |= {"when": "2026-11-22", "commit": "aaaaaaaaaaaa"}
    same = {**new, "runs": [old["run"], new["run"] | {"when": "2026-11-21"}]}
    reports = {"new.json": new, "same.json": same, "old.json": old}
    assert commits_of(reports) == ["bbbbbbbbbbbb", "aaaaaaaaaaaa"], "by time"
    expected = "old.json: measured at bbbbbbbbbbbb+, ? commits ago; changed since: speculative, worker"
    assert list(ages(reports, NOW, tmp_path)) == [expected]


def test_the_results_that_documents_show_have_commits() -> None:
    """They say at how many they were measured, and the first and the last."""
    found = shown(ROOT)
    assert {"latency_cpu.json", "default_drafters_h200.json", "model_matrix.json"} <= found.keys()
    assert 1 < len(commits_of(found)) <= len(found)

"""The documents show results of the code as it is; one that is older is named, with a reason, and its table says so."""

import json
from pathlib import Path
from typing import Any

import pytest
from documents.age import OLDER, age_note, changed_parts, reasons
from documents.fill import documents
from documents.models import ON_CPU, ON_GPU
from documents.own import own_reports
from documents.real_traffic import committed
from documents.result_tables import MARKED
from documents.side_by_side import FILES as SIDE_BY_SIDE
from documents.two_gpus import FILES as TWO_GPUS

from overlap_spec.runtime.source import PARTS, Source, describe_source

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


def test_an_old_result_says_so_and_why(tmp_path: Path) -> None:
    (tmp_path / OLDER).write_text(json.dumps({"a.json": "only prefill changed"}))
    old = report("latency", worker="old", speculative="old")
    assert age_note(report("latency"), tmp_path / "a.json", NOW) == ""
    assert age_note(old, tmp_path / "a.json", NOW) == "older than the code (speculative, worker): only prefill changed"
    assert age_note(old, tmp_path / "b.json", NOW) == "older than the code (speculative, worker): not measured again"


def shown() -> dict[Path, dict[str, Any]]:
    """The results that documents show. Some tables read several, or a record."""
    text, results = "".join(path.read_text() for path in documents()), ROOT / "benchmarks/results"
    paths = {ROOT / match[2] for match in MARKED.finditer(text)}
    listed = (*committed(results), *own_reports(results), *SIDE_BY_SIDE, *TWO_GPUS.values(), ON_CPU, ON_GPU)
    paths |= {results / name for name in listed if (results / name).is_file()}
    return {path: json.loads(path.read_text()) for path in sorted(paths)}


@pytest.mark.slow
def test_every_old_result_that_a_document_shows_is_named_with_a_reason() -> None:
    now, results = describe_source(), ROOT / "benchmarks/results"
    old = {path.name for path, result in shown().items() if changed_parts(result, now)}
    named = set(reasons(results))
    assert old <= named, f"measure again, or name in {OLDER} with the reason why it stands: {sorted(old - named)}"
    assert named <= old, f"current now, take out of {OLDER}: {sorted(named - old)}"
    assert all(len(reason.split()) > 3 for reason in reasons(results).values())

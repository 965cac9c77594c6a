"""benchmarks/tensor_parallel.py: floors of a rank, what is measured again, what must be, and the table of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel
from documents.two_gpus import FILES, NOT_MEASURED, two_gpus_tables
from records.parts import PARTS, TWO_RANKS_ROWS, two_ranks_whole
from rows.rank_floors import Card, Needs, microseconds, needs_of, times_of
from rows.rank_setups import Setup, setups, tiny
from tensor_parallel import Run, compared

from overlap_spec.config import Machine
from overlap_spec.messages import ForwardShape, Roofline
from overlap_spec.metrics.step_floor import CEILINGS, Ceiling
from overlap_spec.runtime.source import PARTS as CODE, Source

ROOT = Path(__file__).parents[3]
SUMS = tensor_parallel.known_sums("NVIDIA H200")
H200 = Card(CEILINGS["NVIDIA H200", "bfloat16"], times_of(SUMS))
NOW = Source("abc", {}, {part: "new" for part in CODE})
PLAIN_8B = Roofline(target=ForwardShape(15_000_000_000, 0, 0, 0, 0))


def run_of(rows: list[dict[str, Any]], output: str | None = None) -> Run:
    return Run({"run": {"device": "NVIDIA H200"}, "engines": {}, "rows": rows}, output, 0.0, 1)


def on_cpu(name: str, ranks: int, directory: Path) -> Needs:
    setup = tiny(next(setup for setup in setups() if setup.name == name), directory)
    return needs_of(setup.config(ranks), Machine(2, has_cuda=False))


def test_sums_are_between_those_that_were_measured() -> None:
    rows = [{"taken": "one-shot", "bytes": 100, "one_shot_us": 5.0, "nccl_us": 1.0}, {"taken": "NCCL", "bytes": 300,
            "nccl_us": 9.0}, {"taken": "one-shot", "bytes": 100, "one_shot_us": 4.0}]  # fmt: skip
    times = times_of(rows)
    assert times == [(100, 4.0), (300, 9.0)], "of one size the least, of the form that is taken"
    assert [microseconds(times, size) for size in (1, 100, 200, 300, 900)] == [4.0, 4.0, 6.5, 9.0, 9.0]


def test_floor_of_a_step_of_two_ranks() -> None:
    """An 8B's 15 GB are read in 1.77 ms by two, and then there are 64 sums."""
    half, us = Roofline(target=ForwardShape(7_504_000_000, 0, 0, 0, 0)), dict(times_of(SUMS))
    found = Needs(half, 1, 64, 8192).step(1, 0, None, H200)
    assert found["sums_ms"] == pytest.approx(64e-3 * us[8192], abs=1e-3)
    assert found["floor_ms"] - found["sums_ms"] == pytest.approx(1.774, abs=1e-3)
    assert Needs(half, 1, 64, 8192).step(128, 0, None, H200)["sums_ms"] == pytest.approx(64e-3 * us[1 << 20], abs=1e-3)
    unknown = Needs(half, 1, 64, 8192).step(1, 0, None, Card(H200.ceiling, ()))
    assert (unknown["sums_ms"], unknown["floor_ms"]) == (None, pytest.approx(1.774, abs=1e-3))


def test_floor_of_a_mixture_has_the_experts_that_were_read() -> None:
    needs = Needs(PLAIN_8B, 1, 0, 0, num_mixtures=10, top_k=8, expert_bytes=1_000_000)
    card = Card(Ceiling(1e12, 0.0), ())
    assert needs.step(1, 0, 8.0, card)["floor_ms"] == 15.0
    assert needs.step(1, 0, 58.0, card)["floor_ms"] == 15.5


@pytest.mark.parametrize("name", ["8b plain", "70b fp8 plain", "30b-a3b plain"])
def test_a_rank_needs_half(name: str, tmp_path: Path) -> None:
    """But for norms and routers."""
    one, two = (on_cpu(name, ranks, tmp_path / str(ranks)).roofline.target for ranks in (1, 2))
    assert 0.5 <= two.weight_bytes / one.weight_bytes < 0.6
    assert 0.5 <= two.row_flop / one.row_flop < 0.55 and two.head_flop * 2 == one.head_flop
    assert on_cpu(name, 2, tmp_path / "sums").num_sums == 4


def test_a_prompts_floor_is_its_operations() -> None:
    needs = Needs(Roofline(target=ForwardShape(0, 0, 1000, 7, 2)), 1, 0, 0)
    assert needs.prompt(10, Card(Ceiling(1.0, 1e6), ()))["floor_ms"] == pytest.approx((10_000 + 110 + 7) / 1e3)


def test_the_part_has_every_row() -> None:
    assert sum(len(setup.sizes()) for setup in setups()) == TWO_RANKS_ROWS
    whole = {"rows": [{"ms": 1.0}] * TWO_RANKS_ROWS}
    assert two_ranks_whole(whole) and not two_ranks_whole({"rows": [*whole["rows"], {"refused": "x"}]})
    (part,) = (part for part in PARTS if part.name == "tp2")
    assert [command.resumes for command in part.commands] == [False, True]


def test_what_is_in_the_report_is_not_measured_again() -> None:
    setup = Setup("8b", "8b plain", {}, (1, 8), prompts=(64,))
    rows = [{"setup": "8b plain", "ranks": 1, "batch": 1, "ms": 2.0}, {"setup": "8b plain", "ranks": 2, "prompt": 64}]
    rows += [{"setup": "8b chain", "ranks": 2, "batch": 8, "ms": 2.0}]
    assert run_of(rows).missing(setup) == [(2, "batch", 1), (1, "batch", 8), (2, "batch", 8), (1, "prompt", 64)]


def test_musts_are_of_two_h200(tmp_path: Path) -> None:
    rows = [{"setup": "8b plain", "ranks": ranks, "batch": 1, "ms": ms} for ranks, ms in ((1, 2.0), (2, 2.61))]
    assert compared(rows) == [{"setup": "8b plain", "batch": 1, "ms": 2.61, "most_ms": 2.6, "kept": False}]
    run = run_of([], str(tmp_path / "report.json"))
    run.add({"setup": "8b chain", "ranks": 2, "batch": 1, "ms": 3.2})
    assert json.loads((tmp_path / "report.json").read_text())["musts"][0]["kept"] is True
    run.report |= {"run": {"device": "NVIDIA H100 80GB HBM3"}, "musts": []}
    run.save()
    assert json.loads((tmp_path / "report.json").read_text())["musts"] == []


def test_too_few_gpus_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py"])
    monkeypatch.setattr(tensor_parallel.machine, "inspect", lambda: Machine(2, has_cuda=True, num_gpus=1))
    assert tensor_parallel.main() == 2
    assert "two ranks need two GPUs: this machine has 1" in capsys.readouterr().err


def report(rows: list[dict[str, Any]], when: str = "2026-11-28") -> dict[str, Any]:
    source = {"trees": {}, "code": {part: "new" for part in CODE}}
    about = {"when": when, "device": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "command": "x"}
    return {"run": about | {"commit": "c" * 12, "source": source}, "rows": rows}


ROWS = [
    {"setup": "8b plain", "ranks": 1, "batch": 8, "ms": 3.7, "floor_ms": 3.58, "sums_ms": 0.0},
    {"setup": "8b plain", "ranks": 2, "batch": 8, "ms": 2.405, "floor_ms": 2.16, "sums_ms": None},
    {"setup": "70b plain", "ranks": 2, "prompt": 8192, "ms": 1234.0, "floor_ms": 900.0, "sums_ms": 40.0},
    {"setup": "70b fp8 plain", "ranks": 2, "refused": "CheckpointError: fp8 is not divided"},
]


def lines_of(results: Path) -> list[str]:
    return [line for line in two_gpus_tables(results).splitlines() if line.startswith(("| ", "- "))]


def test_the_page_is_written_without_figures_and_with_them(tmp_path: Path) -> None:
    assert two_gpus_tables(tmp_path) == f"Engines: {NOT_MEASURED}\n\nSums: {NOT_MEASURED}"
    (tmp_path / FILES["tensor_parallel"]).write_text(json.dumps(report(ROWS)))
    lines = lines_of(tmp_path)
    assert lines[0] == "| shape and method | batch 8 | first token of 8,192 |"
    assert lines[2] == "| 8b plain | 3.7 (3.58) / 2.405 (2.16 without sums): 0.65 |  |"
    assert lines[3] == "| 70b plain |  | - / 1,234 (900) |"
    assert lines[4] == "| 70b fp8 plain | 2 ranks: CheckpointError: fp8 is not divided |  |"
    assert lines[5].startswith("- [tensor_parallel_h200.json]") and "NVIDIA H200; commit cccccccccccc" in lines[5]


def test_a_part_of_the_record_comes_before_files(tmp_path: Path) -> None:
    (tmp_path / FILES["tensor_parallel"]).write_text(json.dumps(report(ROWS)))
    (tmp_path / "h200").mkdir()
    sums = [{"rows": 1, "columns": 4096, "bytes": 8192, "taken": "one-shot", "nccl_us": 7.62, "one_shot_us": 5.45}]
    for digest, ms, when in (("aaa", 9.0, "2026-11-28"), ("bbb", 2.0, "2026-11-29")):
        rows = [ROWS[0], ROWS[1] | {"ms": ms}]
        reports = {"tensor_parallel": report(rows), "reductions": report(sums)}
        of = {"part": "tp2", "card": "h200", "digest": digest, "record": {"tp2": digest, "tables": "ccc"}}
        file = of | {"run": {"when": when, "device": "NVIDIA H200"}, "reports": reports}
        (tmp_path / "h200" / f"tp2-{digest}.json").write_text(json.dumps(file))
    lines = lines_of(tmp_path)
    assert lines[2].startswith("| 8b plain | 3.7 (3.58) / 2 ("), "the newest one's"
    assert "tp2, tensor_parallel" in lines[3]
    assert "| 1 x 4,096 | 8,192 | 5.5 |  | 7.6 | one-shot |" in lines

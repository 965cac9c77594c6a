"""Benchmarks without an engine: prompts, ratios, targets and the tables made of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from overlap_spec.bench.engines import variants
from overlap_spec.bench.runs import _batch_ratios
from overlap_spec.bench.tables import fill, render
from overlap_spec.bench.targets import TARGETS, Target
from overlap_spec.bench.workload import Workload, batch_prompts, chat_prompts, random_prompts, read_prompts
from overlap_spec.cli.bench import _print
from overlap_spec.config import EngineConfig

RUN = {
    "device": "NVIDIA H200",
    "commit": "abc",
    "versions": {"torch": "2.11"},
    "command": "overlap-spec bench throughput",
}


def part(model: str, speeds: dict[int, float], **more: Any) -> dict[str, Any]:
    settings = {"model": model, "method": "EAGLE3", "num_steps": 3, "topk": 1, "num_draft_tokens": 4}
    batches = [
        {"batch": batch, "tokens_per_second": speed, "streamed_tokens_per_second": speed, "step_ms": 2.0 * batch,
         "accept_length": 2.5, "runs": []}
        for batch, speed in speeds.items()
    ]  # fmt: skip
    return {"settings": settings, "batches": batches} | more


def report(model: str = "smollm2", acceptance: str = "real") -> dict[str, Any]:
    chats = {"tokens_per_second": 3000.0}
    return {
        "benchmark": "throughput",
        "run": RUN,
        "acceptance": acceptance,
        "engine": part(model, {1: 100.0, 8: 700.0, 32: 2000.0, 64: 4200.0}, chats=chats),
        "plain": part(model, {1: 50.0, 8: 700.0, 32: 2500.0, 64: 4000.0}, chats={"tokens_per_second": 2000.0}),
        "depth1": part(model, {1: 80.0, 8: 700.0, 32: 2000.0, 64: 4000.0}, chats=chats),
    }


def row_of(table: str, work: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {work} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("vocab_size", [49152, 128256])
def test_random_prompts_are_fixed_valid_and_different(vocab_size: int) -> None:
    prompts = random_prompts(64, vocab_size)
    assert prompts == random_prompts(64, vocab_size)
    assert all(len(prompt) == 128 and min(prompt) >= 0 and max(prompt) < vocab_size for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts + random_prompts(20, vocab_size, first=1000)}) == 84


def test_smollm2_takes_the_first_of_the_peers_prompts_in_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = read_prompts("peer64")
    config = EngineConfig(load_format="dummy", skip_tokenizer_init=True)
    prompts = batch_prompts(config, Workload(prompts="peer64", batch_sizes=(1, 3)), 49152)
    assert prompts == chat_prompts(config, texts[:3])
    assert len(texts) == 64 and prompts[0][0] == 1 and len(prompts[0]) > 10  # <|im_start|>


def test_variants() -> None:
    config = EngineConfig(speculative_simulate_acc_len=2.0, load_format="dummy")
    found = variants(config, ["plain", "depth1"])
    assert list(found) == ["engine", "plain", "depth1"]
    assert found["engine"] is config
    assert found["plain"].speculative_algorithm == "NONE" and found["plain"].speculative_simulate_acc_len is None
    assert found["plain"].load_format == "dummy" and not found["plain"].disable_overlap_schedule
    assert found["depth1"].disable_overlap_schedule and found["depth1"].speculative_simulate_acc_len == 2.0
    assert list(variants(config, [])) == ["engine"]


def test_ratios_of_each_batch_and_of_chats() -> None:
    ratios = _batch_ratios(report(), ["plain", "depth1"])
    assert [row["batch"] for row in ratios] == [1, 8, 32, 64, "chats"]
    assert ratios[0] == {"batch": 1, "engine / plain": 2.0, "engine / depth1": 1.25}
    assert ratios[-1] == {"batch": "chats", "engine / plain": 1.5, "engine / depth1": 1.0}


def test_targets_beside_what_was_measured() -> None:
    table = render(report(), "targets")
    assert row_of(table, "plain, batch 1, ms a step") == ["1.17", "0.6", "0.4", "2", "0.585", "no"]
    chats = row_of(table, "EAGLE-3, chat20 to end of turn, batch 1, tok/s")
    assert chats == ["", "2400", "3900", "3000", "", "yes"]
    worst = row_of(table, "EAGLE-3 / plain tok/s, worst of batch 1, 8, 32, 64")
    assert worst == ["0.58", "0.98", "1", "0.8", "1.379", "no"]
    assert row_of(table, "depth 2 / depth 1 tok/s, batch 64") == ["0.88", "1", "", "1.05", "1.193", "yes"]


def test_what_was_not_measured_is_left_empty() -> None:
    alone = {key: value for key, value in report().items() if key not in ("plain", "depth1")}
    table = render(alone, "targets")
    assert row_of(table, "plain, batch 1, ms a step")[3:] == ["", "", ""]
    assert row_of(table, "EAGLE-3 / plain tok/s, worst of batch 1, 8, 32, 64")[3:] == ["", "", ""]


def test_the_shapes_directory_has_targets_too() -> None:
    table = render(report("benchmarks/shapes/llama-3.1-8b", "synthetic acceptance: 2.5 a step"), "targets")
    step = row_of(table, "EAGLE-3 (3, 1, 4), synthetic acceptance of 2.5, batch 8, ms a step")
    assert step == ["6.57", "5.4", "5.1", "16", "0.4106", "no"]
    assert table.splitlines()[-1].startswith("synthetic acceptance: 2.5 a step; NVIDIA H200; commit abc")


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_the_aim_is_no_easier_than_what_must_be_and_better_than_the_peer(targets: tuple[Target, ...]) -> None:
    for target in targets:
        assert target.aim is None or target.is_met(target.aim), target.work
        ratio = target.ratio(target.must)
        assert ratio is None or ratio > 1, target.work


def test_a_file_is_filled_in_both_views(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text(json.dumps(report()))
    text = "<!-- table: out.json -->\nold\n<!-- end -->\n<!-- table: out.json as targets -->\nold\n<!-- end -->\n"
    filled = fill(text, tmp_path)
    assert filled.count("| overlap-spec, EAGLE3 (3, 1, 4), one step in flight | 64 |") == 1
    assert "| SGLang 0.5.14 | must |" in filled and "old" not in filled
    assert fill(filled, tmp_path) == filled


def test_the_printed_tables_say_synthetic_and_show_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    _print(report(acceptance="synthetic acceptance: 2.5 a step") | {"ratios": _batch_ratios(report(), ["plain"])})
    printed = capsys.readouterr().out
    assert "synthetic acceptance: 2.5 a step" in printed and "engine / plain" in printed and "4200.0" in printed
    _print(report())
    assert "synthetic" not in capsys.readouterr().out


def test_step_ops_have_a_column_for_every_number_of_rows() -> None:
    row = {"op": "linear_add", "model": "m", "workload": "down", "time_us": 11.31, "gb_per_s": 2969.4, "share": 0.7019}
    report = {"gpu": "G", "commit": "c", "versions": {}, "command": "x", "measurements": []}
    report["step_measurements"] = [row | {"num_rows": rows} for rows in (1, 4)] + [
        row | {"num_rows": 16, "op": "select_rows"}
    ]
    table = render(report, "step_ops").splitlines()
    assert table[0] == "| op | model | shape | 1 | 4 | 16 |"
    assert table[2] == "| `linear_add` | m | down | 11.3 / 2969 / 70% | 11.3 / 2969 / 70% |  |"
    assert table[3] == "| `select_rows` | m | down |  |  | 11.3 / 2969 / 70% |"


def test_a_round_trip_says_which_cpu_and_whether_it_polled() -> None:
    row = {"polls": True, "batch": 64, "depth": 2, "device_us": 400, "answer_us": 45.5, "answer_p90_us": 60.0}
    run = {"device": "none", "cpu": "C", "num_threads": 8, "versions": {}, "commit": "c", "command": "x"}
    lines = render({"benchmark": "round_trip", "run": run, "figures": [row | {"beyond_us": -0.1}]}).splitlines()
    assert lines[2] == "| polls | 64 | 2 | 400 | 45.5 | 60 | -0.1 |"
    assert lines[-1].startswith("C, 8 threads; commit c")


def test_an_engine_whose_steps_may_be_narrower_says_so() -> None:
    adaptive = report()
    adaptive["engine"]["settings"]["narrower"] = [1, 2, 3]
    table = render(adaptive)
    assert table.count("| overlap-spec, EAGLE3 (3, 1, 4), adaptive |") == len(adaptive["engine"]["batches"]) > 0
    assert "one step in flight, adaptive" not in table

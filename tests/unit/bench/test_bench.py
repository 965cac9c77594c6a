"""Benchmarks without an engine: prompts, ratios and the tables made of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from documents.result_tables import fill, render

from overlap_spec.bench.report import variants
from overlap_spec.bench.runs import _batch_ratios
from overlap_spec.bench.workload import (
    GREEDY,
    SAMPLED,
    SamplingMode,
    Workload,
    batch_prompts,
    chat_prompts,
    load_prompts,
    random_prompts,
    warm_up_prompts,
)
from overlap_spec.config import EngineConfig
from overlap_spec.entrypoints.cli.bench import _print
from overlap_spec.errors import ConfigError

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
         "accept_length": 2.5, "one_token_wall_s": 0.004 * batch, "one_token_walls_s": [], "runs": []}
        for batch, speed in speeds.items()
    ]  # fmt: skip
    return {"settings": settings, "batches": batches} | more


def chats_of(speed: float) -> dict[str, Any]:
    speeds = {"tokens_per_second": speed, "num_ended": 15, "ended_tokens_per_second": speed / 2}
    counts = {"prompts": "chat20", "num_prompts": 20, "num_tokens": 4110, "accept_length": 2.7}
    return counts | speeds | {"step_ms": 0.6, "first_token_ms_median": 2.5}


def with_sampled(report: dict[str, Any]) -> dict[str, Any]:
    """At temperature 1 half as fast, at 0.7 in between: plain decoding hardly slower."""
    for name, shares in (("engine", (0.5, 0.75)), ("plain", (0.9, 0.95))):
        for row in (*report[name]["batches"], report[name]["chats"]):
            row["sampled"] = [
                {**row, "temperature": way.temperature, "top_p": way.top_p, "accept_length": 1.5}
                | {"tokens_per_second": share * row["tokens_per_second"]}
                for way, share in zip(SAMPLED, shares, strict=True)
            ]
    return report


def report(model: str = "smollm2", acceptance: str = "real") -> dict[str, Any]:
    return {
        "benchmark": "throughput",
        "run": RUN,
        "acceptance": acceptance,
        "engine": part(model, {1: 100.0, 8: 700.0, 32: 2000.0, 64: 4200.0}, chats=chats_of(3000.0)),
        "plain": part(model, {1: 50.0, 8: 700.0, 32: 2500.0, 64: 4000.0}, chats=chats_of(2000.0)),
        "depth1": part(model, {1: 80.0, 8: 700.0, 32: 2000.0, 64: 4000.0}, chats=chats_of(3000.0)),
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


@pytest.mark.parametrize("vocab_size", [49152, 128256])
def test_what_warms_up_is_as_long_as_what_is_measured_and_never_measured(vocab_size: int) -> None:
    measured = random_prompts(64, vocab_size) + random_prompts(20, vocab_size, first=1000) + [[7] * 40]
    cold = warm_up_prompts(measured, vocab_size)
    assert [len(prompt) for prompt in cold] == [len(prompt) for prompt in measured]
    assert not {tuple(prompt) for prompt in cold} & {tuple(prompt) for prompt in measured}
    assert all(min(prompt) >= 0 and max(prompt) < vocab_size for prompt in cold)


def test_ways_of_sampling() -> None:
    assert [way.label for way in (GREEDY, *SAMPLED)] == ["greedy", "T 1", "T 0.7, top_p 0.9"]
    params = SamplingMode(0.7, 0.9).params(50)
    assert (params.temperature, params.top_p, params.max_new_tokens, params.seed) == (0.7, 0.9, 50, 0)
    assert not params.ignore_eos


@pytest.mark.slow
def test_smollm2_takes_the_first_of_the_peers_prompts_in_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = load_prompts("peer64")
    config = EngineConfig(load_format="dummy", skip_tokenizer_init=True)
    prompts = batch_prompts(config, Workload(prompts="peer64", batch_sizes=(1, 3)), 49152)
    assert prompts == chat_prompts(config, texts[:3])
    assert len(texts) == 64 and prompts[0][0] == 1 and len(prompts[0]) > 10  # <|im_start|>


def test_variants() -> None:
    config = EngineConfig(speculative_simulate_acc_len=(2.0,), load_format="dummy")
    found = variants(config, ["plain", "depth1"])
    assert list(found) == ["engine", "plain", "depth1"]
    assert found["engine"] is config
    assert found["plain"].speculative_algorithm == "NONE" and found["plain"].speculative_simulate_acc_len is None
    assert found["plain"].load_format == "dummy" and not found["plain"].disable_overlap_schedule
    assert found["depth1"].disable_overlap_schedule and found["depth1"].speculative_simulate_acc_len == (2.0,)
    assert list(variants(config, [])) == ["engine"]


def test_ratios_of_each_batch_and_of_chats() -> None:
    ratios = _batch_ratios(report(), ["plain", "depth1"])
    assert [row["batch"] for row in ratios] == [1, 8, 32, 64, "chats"]
    assert ratios[0] == {"batch": 1, "engine / plain": 2.0, "engine / depth1": 1.25}
    assert ratios[-1] == {"batch": "chats", "engine / plain": 1.5, "engine / depth1": 1.0}


def test_ratios_of_sampling_follow_those_of_greedy() -> None:
    ratios = _batch_ratios(with_sampled(report()), ["plain", "depth1"])
    assert [row["batch"] for row in ratios[:5]] == [1, 8, 32, 64, "chats"]
    assert ratios[5] == {"batch": 1, "sampling": "T 1", "engine / plain": 1.111}  # 50 / 45
    assert ratios[-1] == {"batch": "chats", "sampling": "T 0.7, top_p 0.9", "engine / plain": 1.184}


def test_sampling_stands_beside_greedy_decoding() -> None:
    table = render(with_sampled(report()), "sampled")
    assert table.splitlines()[0].count("plain, tok/s") == 3
    cells = row_of(table, "batch 8")
    assert cells[:3] == ["700 (2.50)", "700", "1.00"] and cells[3:6] == ["350 (1.50)", "630", "**0.56** slower"]
    assert cells[6:] == ["525 (1.50)", "665", "**0.79** slower"]
    assert row_of(table, "chat20, one by one")[3:6] == ["1500 (1.50)", "1800", "**0.83** slower"]
    assert row_of(render(report(), "sampled"), "batch 8")[3:] == [""] * 6


def test_latency_at_other_temperatures_has_rows_of_its_own() -> None:
    figures = {"tokens_per_second": 100.0, "accept_length": 2.5, "step_ms": 1.0, "first_token_ms_median": 3.0}
    drawn = figures | {"tokens_per_second": 60.0, "temperature": 1.0, "top_p": 1.0}
    engine = {**part("m", {}), **figures, "sampled": [drawn]}
    slow = {"engine": "transformers generate", "tokens_per_second": 50.0}
    table = render({"benchmark": "latency", "run": RUN, "engine": engine, "transformers": slow})
    assert row_of(table, "overlap-spec, EAGLE3 (3, 1, 4)") == ["100", "2.00", "2.5", "1", "3"]
    assert row_of(table, "overlap-spec, EAGLE3 (3, 1, 4), T 1") == ["60", "", "2.5", "1", "3"]


def test_a_file_is_filled_in_both_views(tmp_path: Path) -> None:
    synthetic = report(acceptance="synthetic acceptance: 2.5 a step")
    (tmp_path / "out.json").write_text(json.dumps(synthetic))
    text = "<!-- table: out.json -->\nold\n<!-- end -->\n<!-- table: out.json as sampled -->\nold\n<!-- end -->\n"
    filled = fill(text, tmp_path)
    assert filled.count("| 64 | 4,200 |") == 1
    assert "| batch 64 |" in filled and "\nold\n" not in filled
    assert filled.count("synthetic acceptance: 2.5 a step; NVIDIA H200; commit abc") == 2
    assert fill(filled, tmp_path) == filled


def test_the_printed_tables_say_synthetic_and_show_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    _print(report(acceptance="synthetic acceptance: 2.5 a step") | {"ratios": _batch_ratios(report(), ["plain"])})
    printed = capsys.readouterr().out
    assert "synthetic acceptance: 2.5 a step" in printed and "engine / plain" in printed and "4200.0" in printed
    _print(report())
    assert "synthetic" not in capsys.readouterr().out
    _print(with_sampled(report()))
    printed = capsys.readouterr().out
    assert "2100.0" in printed and "top_p" in printed and "1500.0" in printed
    assert max(map(len, printed.splitlines())) <= 80, "a heading or a figure is cut in a small terminal"


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


def test_tables_say_which_cpu() -> None:
    row = {"tokens_per_second": 50.0, "engine": "transformers generate"}
    run = {"device": "cpu", "cpu": "C", "num_threads": 8, "versions": {}, "commit": "c", "command": "x"}
    assert render({"benchmark": "latency", "run": run, "transformers": row}).splitlines()[-1].startswith("C, 8 threads")


def test_an_engine_whose_steps_may_be_narrower_says_so() -> None:
    adaptive = report()
    adaptive["engine"]["settings"]["narrower"] = [1, 2, 3]
    assert "| overlap-spec, EAGLE3 (3, 1, 4), adaptive, tok/s |" in render(adaptive)


def test_batches_have_a_column_for_every_engine_and_what_is_slower_is_marked() -> None:
    lines = render(report()).splitlines()
    assert lines[0].endswith(" | plain, tok/s | the first / one step in flight | the first / plain |")
    assert lines[4] == "| 32 | 2,000 | 2,000 | 2,500 | 1.00 | **0.80** slower |"


@pytest.mark.parametrize("content", [None, "{}", "[1]", "[", "nonsense"])
def test_prompts_that_are_none_name_the_flag(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "texts.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="--prompts: .*texts.json is no set of prompts .*chat20, copy20, peer64"):
        load_prompts(str(path))

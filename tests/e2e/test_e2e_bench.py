"""Throughput, traffic and rows of real traffic, from command line to JSON, on dummy models of a config.json alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rows.quantities import QUANTITIES
from support.command_line import environment, run_command
from support.tiny.models import tiny_eagle3, tiny_target

from overlap_spec.entrypoints.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two config files, no weights and no tokenizer."""
    directory = tmp_path_factory.mktemp("shapes")
    target = tiny_target(seed=1, max_position_embeddings=2048)
    for name, checkpoint in (("target", target), ("head", tiny_eagle3(seed=2, target=target))):
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(checkpoint.config))
    return directory


def flags(shapes: Path) -> tuple[str, ...]:
    return (
        *("--model-path", str(shapes / "target"), "--load-format", "dummy", "--max-total-tokens", "8000"),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model", str(shapes / "head")),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    )


@pytest.mark.full
def test_throughput_of_a_dummy_model(tmp_path: Path, shapes: Path) -> None:
    output = tmp_path / "out.json"
    workload = ("--prompts", "random", "--num-tokens", "120", "--batch-sizes", "1,4", "--with-plain")
    own = ("--speculative-simulate-acc-len", "2.5", "--output", str(output))
    done = run_command(tmp_path, "bench", "throughput", *flags(shapes), *workload, *own)
    assert done.returncode == 0, done.stderr
    assert "synthetic acceptance: 2.5" in done.stdout
    report = json.loads(output.read_text())
    assert report["acceptance"].startswith("synthetic acceptance: 2.5")
    engine, plain = report["engine"], report["plain"]
    assert engine["settings"]["acceptance"] == report["acceptance"] and plain["settings"]["acceptance"] == ""
    assert engine["settings"]["load_format"] == "dummy" and not engine["settings"]["prefix_cache"]
    assert engine["start_s"] > 0 and engine["facts"]["worker"]["device"] == "cpu"
    for batch, rows in zip((1, 4), zip(engine["batches"], plain["batches"], strict=True), strict=True):
        for row in rows:
            assert row["batch"] == batch and row["num_tokens"] == 120 * batch and len(row["runs"]) == 2
            assert row["wall_s"] == min(run["wall_s"] for run in row["runs"])
            assert len(row["one_token_walls_s"]) == 5 and row["one_token_wall_s"] == min(row["one_token_walls_s"])
            assert row["step_ms"] > 0 and row["streamed_tokens_per_second"] > 0
    assert engine["batches"][1]["accept_length"] == pytest.approx(2.5, rel=0.1)
    assert plain["batches"][1]["accept_length"] == 0.0 and plain["batches"][1]["steps"] == 119
    assert engine["first_token"]["num_requests"] == 20 and engine["first_token"]["first_token_ms_median"] > 0
    assert [set(row) for row in report["ratios"]] == [{"batch", "engine / plain"}] * 2


@pytest.mark.full
def test_sampling_after_greedy_with_n_grams_that_learn_nothing_from_run_to_run(tmp_path: Path, shapes: Path) -> None:
    """A second run that knew the first one's answers would take fewer steps."""
    output = tmp_path / "out.json"
    target = ("--model-path", str(shapes / "target"), "--load-format", "dummy", "--max-total-tokens", "8000")
    workload = ("--prompts", "random", "--num-tokens", "60", "--batch-sizes", "1", "--with-sampled", "--with-plain")
    fixed = ("--speculative-num-draft-tokens", "8")  # widths that follow measured costs differ from run to run
    flags = (*target, "--speculative-algorithm", "NGRAM", *fixed, *workload, "--output", str(output))
    done = run_command(tmp_path, "bench", "throughput", *flags)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    for name in ("engine", "plain"):
        (row,) = report[name]["batches"]
        assert [(way["temperature"], way["top_p"]) for way in row["sampled"]] == [(1.0, 1.0), (0.7, 0.9)]
        assert all(len(way["runs"]) == 1 and way["num_tokens"] == 60 for way in row["sampled"])
    first, second = report["engine"]["batches"][0]["runs"]
    assert first["steps"] == second["steps"] and first["accept_length"] == second["accept_length"]
    ways = [row.get("sampling") for row in report["ratios"]]
    assert ways == [None, "T 1", "T 0.7, top_p 0.9"] and all(row["engine / plain"] > 0 for row in report["ratios"])


@pytest.mark.slow
def test_traffic_of_a_dummy_model(tmp_path: Path, shapes: Path) -> None:
    output, sent = tmp_path / "out.json", tmp_path / "sent.jsonl"
    traffic = ("--request-rate", "20", "--num-requests", "12", "--limit-s", "60", "--save-arrivals", str(sent))
    lengths = ("--prompt-lognormal", "3,0.5,4,60", "--output-lognormal", "3,0.5,8,60", "--output", str(output))
    done = run_command(tmp_path, "bench", "serve", *flags(shapes), "--skip-tokenizer-init", *traffic, *lengths)
    assert done.returncode == 0, done.stderr
    assert "engine: first token p99" in done.stdout or "engine: time per token p99" in done.stdout
    assert max(map(len, done.stdout.splitlines()[2:])) <= 80 and "measuring" in done.stderr
    arrivals = [json.loads(line) for line in sent.read_text().splitlines()]
    report = json.loads(output.read_text())
    engine = report["engine"]
    assert len(arrivals) == engine["answered"] == report["workload"]["requests"] == 12 and not engine["errors"]
    assert engine["tokens"] == sum(arrival["output_len"] for arrival in arrivals)
    assert engine["prompt_tokens"] == sum(arrival["prompt_len"] for arrival in arrivals)
    assert engine["settings"]["num_draft_tokens"] == 4 and report["run"]["command"].startswith(
        "overlap-spec bench serve"
    )


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("command", ["serve", "chat"])
def test_synthetic_acceptance_is_for_benchmarks_only(tmp_path: Path, shapes: Path, command: str) -> None:
    done = run_command(tmp_path, command, *flags(shapes), "--speculative-simulate-acc-len", "2.5")
    assert done.returncode == 2
    assert "--speculative-simulate-acc-len: makes acceptance synthetic" in done.stderr
    assert "bench only" in done.stderr


def test_flags_of_throughput_are_refused_for_latency(
    shapes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *handler: None)
    for flag in (("--with-depth1",), ("--with-chats", "chat20")):
        assert main(("bench", "latency", *flags(shapes), *flag)) == 2
        assert "goes with throughput only" in capsys.readouterr().err


@pytest.mark.full
def test_rows_of_real_traffic_on_a_tiny_engine(tmp_path: Path) -> None:
    output = tmp_path / "real_traffic_h200.json"
    words = ("benchmarks/real_traffic.py", "--tiny", "--rows", "7,6", "--limit-s", "60", "--output", str(output))
    own = environment(tmp_path)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=own, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert not report["failed"] and report["run"]["command"].startswith("python benchmarks/real_traffic.py --tiny")
    measured = {(cell["row"], cell["part"]): cell["value"] for cell in report["cells"]}
    assert {row for row, _ in measured} == {2, 6, 7} and min(measured.values()) > 0
    reports = {output.name: report}
    own = [each for each in QUANTITIES if each.benchmark == "real_traffic" and each.row in (2, 6, 7)]
    read = [each.measured(reports) for each in own]
    assert None not in read and len(read) == len(measured)

"""`bench methods` from the command line to its JSON, on a tiny model in float64, where every answer is plain's."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import run_command

from overlap_spec.entrypoints.cli import main

CHAIN = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
TABLE = [
    {"label": "chain", "algorithm": "EAGLE3", **CHAIN},
    {"label": "half of the numbers", "algorithm": "EAGLE3", "num_steps": 3},
    {"label": "mapped", "algorithm": "EAGLE3", **CHAIN, "token_map": True},
    {"label": "no draft", "learns": True, "algorithm": "STANDALONE", **CHAIN},
    {"label": "no layer of its own", "algorithm": "NEXTN", **CHAIN},
    {"label": "no such method", "algorithm": "ORACLE", **CHAIN},
    {"label": "another head", "algorithm": "EAGLE", **CHAIN},
]
SIZES = ("--num-tokens", "12", "--batch-sizes", "4,1", "--num-prompts", "3", "--runs", "1")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[dict[str, Any], str, int]:
    """The report, what was printed, and the status."""
    directory = tmp_path_factory.mktemp("methods")
    for name, content in (("table", TABLE), ("texts", ["abc abc", "hello", "a b c d"])):
        (directory / f"{name}.json").write_text(json.dumps(content))
    head, output = tiny_model / "head", directory / "out.json"
    done = run_command(
        directory,
        *("bench", "methods", "--model", str(tiny_model), "--dtype", "float64", "--output", str(output), *SIZES),
        *("--prompts", f"{directory / 'texts.json'},random", "--methods", str(directory / "table.json")),
        *("--draft", f"EAGLE3={head}", "--draft", f"EAGLE={head}", "--starts-at-once", "2"),
    )
    assert output.exists(), done.stderr
    return json.loads(output.read_text()), done.stdout, done.returncode


def entries(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["label"]: entry for entry in report["methods"]}


@pytest.mark.full
def test_every_load_is_measured_and_compared_with_plain(ran: tuple[dict[str, Any], str, int]) -> None:
    by_label = entries(ran[0])
    assert list(by_label) == ["plain", *(row["label"] for row in TABLE)]
    for label in ("plain", "chain"):
        assert by_label[label]["status"] == "ran" and by_label[label]["start_s"] > 0
        rows = by_label[label]["figures"]
        assert [row["batch"] for row in rows] == [1, 4, 1, 4]
        assert [row["num_requests"] for row in rows] == [3, 4, 3, 4]
        assert [row["num_repeated"] for row in rows] == [0, 1, 0, 1]
        for row, plain in zip(rows, by_label["plain"]["figures"], strict=True):
            assert row["identical"] == 1.0 and row["step_ms"] > 0 and row["num_tokens"] == plain["num_tokens"]
            assert row["ratio"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"], abs=1e-3)
            assert row["accept_length"] == 1.0 if label == "plain" else 1.0 < row["accept_length"] <= 4.0


@pytest.mark.full
def test_memory_is_what_the_engine_says(ran: tuple[dict[str, Any], str, int]) -> None:
    plain, chain = (entries(ran[0])[label]["memory"] for label in ("plain", "chain"))
    target = 2 * 2 * 2 * 16 * 8  # keys and values of two layers with two heads of 16 in float64
    assert plain["kv_bytes_per_token"] == target and plain["draft_kv_bytes_per_token"] == 0
    assert chain["draft_kv_bytes_per_token"] == target // 2  # one layer
    assert chain["kv_bytes_per_token"] == target + target // 2


@pytest.mark.full
def test_what_did_not_run_says_why(ran: tuple[dict[str, Any], str, int]) -> None:
    report, printed, status = ran
    why = {label: (entry["status"], entry.get("reason", "")) for label, entry in entries(report).items()}
    assert why["no draft"] == ("skipped", "needs --draft STANDALONE=PATH")
    assert why["no layer of its own"] == ("skipped", "needs --draft NEXTN=PATH")
    assert why["mapped"] == ("skipped", "needs --token-map FILE")
    assert why["half of the numbers"][0] == "refused" and "--speculative-eagle-topk" in why["half of the numbers"][1]
    assert why["no such method"][0] == "refused" and "'ORACLE'" in why["no such method"][1]
    assert why["another head"][0] == "failed" and status == 1
    assert "no draft (3, 1, 4): skipped: needs --draft STANDALONE=PATH" in printed


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("methods", "--with-plain"), "--with-plain goes with latency and throughput and serve only"),
        (("methods", "--speculative-algorithm", "NONE"), "--speculative-algorithm does not go with methods"),
        (("methods", "--draft", "EAGLE"), "--draft: must be NAME=PATH"),
        (("methods", "--draft", "ORACLE=x"), "--draft: no row that is measured is of 'ORACLE'"),
        (("methods", "--only", "EAGLE3", "--token-map", "x"), "--token-map: no row that is measured uses one"),
        (("methods", "--runs", "0"), "--runs: must be at least 1"),
        (("step", "--runs", "2"), "--runs goes with latency and methods only"),
        (("throughput", "--temperature", "1"), "--temperature goes with latency and methods and step only"),
        (("step", "--with-sampled"), "--with-sampled goes with latency and throughput only"),
        (("methods", "--methods", "nowhere.json"), "--methods: nowhere.json is no table"),
        (("latency", "--draft", "EAGLE=x"), "--draft goes with methods only"),
    ],
)
def test_what_has_no_effect_is_refused(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *handler: None)
    assert main(("bench", *words)) == 2
    assert complaint in capsys.readouterr().err

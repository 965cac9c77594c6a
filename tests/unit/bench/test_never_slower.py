"""Never slower: a cell's speed, its ratios, and a report that is gone on with."""

import argparse
import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import adapt_draft
import drafters
import never_slower
import pytest
from drafters import Window, joined, rows_of, trained
from never_slower import AGAIN, DEFAULT, FIXED_BATCHES, PLAIN, SPEEDS, Case, Progress, Run, known_cases, row_of
from records.parts import SLOWER_ROWS

from overlap_spec.errors import OverlapSpecError

ONE = dict.fromkeys(SPEEDS, 1.0)


def played(report: dict[str, Any], output: Path | None = None, limit_s: float = 1e9) -> Run:
    return Run(report, None if output is None else str(output), limit_s, rounds=3)


def test_speed_is_of_the_middle_half(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(never_slower.time, "perf_counter", lambda: next(clock))
    progress = Progress(400)
    for _ in range(100):
        progress.add(4)
    assert progress.marks == [(100, 10.0), (300, 12.0)] and progress.middle() == (200, 2.0)


def test_an_answer_that_comes_as_one_has_no_speed() -> None:
    progress = Progress(8)
    progress.add(7)
    progress.add(1)
    assert len(progress.marks) == 2 and progress.middle()[0] == 1
    progress = Progress(8, marks=[(8, 1.0), (8, 1.0)])
    with pytest.raises(OverlapSpecError, match="ask for longer answers"):
        progress.middle()


def test_ratios_are_of_medians_and_plain_decoding_has_one_to_itself() -> None:
    def runs(*speeds: float) -> list[dict[str, Any]]:
        return [{"call": speed, "answers": 10 * speed, "engine": 2 * speed + 10} for speed in speeds]

    row = row_of("8b-2.5", "cell", 8, 64, {DEFAULT: runs(9, 30, 15), PLAIN: runs(10, 1, 20), AGAIN: runs(9, 9.5, 40)})
    assert row["over_plain"]["call"] == row["over_plain"]["answers"] == {DEFAULT: 1.5, AGAIN: 0.95}
    assert row["over_plain"]["engine"] == {DEFAULT: 1.3333, AGAIN: 0.9667}
    assert row["plain"] == {"call": 10, "answers": 100, "engine": 30}


def test_numbers_that_cannot_commit_so_much_commit_what_they_can() -> None:
    engines = known_cases(None)["8b-3.5"].fixed
    lengths = {name: flags["speculative_simulate_acc_len"] for name, flags in engines.items()}
    assert lengths == {"fixed 2": (2, 1.3), "fixed 4": (3.5, 1.3), "fixed 8": (3.5, 1.3)}


def test_a_case_is_whole_with_its_last_row(tmp_path: Path) -> None:
    chat, shape = Case({}, "chat20"), known_cases(None)["8b-2.5"]
    run = played({"rows": []}, tmp_path / "report.json")
    for case, last in ((chat, ("arrivals", 256, 64)), (shape, ("fixed 8", 256, 256))):
        run.report["rows"].clear()
        run.add(row_of("name", "cell", 256, 256, {PLAIN: [ONE]}))
        assert not run.is_whole("name", case)
        run.add(row_of("name", *last, {PLAIN: [ONE]}))
        assert run.is_whole("name", case) and not run.is_whole("other", case)
    assert len(json.loads((tmp_path / "report.json").read_text())["rows"]) == 2, "it is written after every row"


def test_cells_of_some_batches_keep_their_order_and_are_all_that_is_measured(tmp_path: Path) -> None:
    """In the whole grid 24 requests of 64 tokens come after 32 of 256, so what was learnt there is what they meet."""
    whole = known_cases(None)["8b-1.3"]
    some, run = dataclasses.replace(whole, only=(24, 32)), played({"rows": []}, tmp_path / "report.json")
    assert some.cells("8b-1.3") == [cell for cell in whole.cells("8b-1.3") if cell[0] in (24, 32)]
    assert some.cells("8b-1.3").index((32, 256)) < some.cells("8b-1.3").index((24, 64))
    for cell in some.cells("8b-1.3"):
        assert not run.is_whole("8b-1.3", some)
        run.add(row_of("8b-1.3", "cell", *cell, {PLAIN: [ONE]}))
    assert run.is_whole("8b-1.3", some) and not run.is_whole("8b-1.3", whole)


def test_cells_that_are_there_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, Case]] = []

    async def note(name: str, case: Case, run: Run) -> None:
        measured.append((name, case))

    monkeypatch.setattr(never_slower, "measure_case", note)
    done, left = Case({}, "chat20"), Case({}, "copy20")
    report = {"rows": [row_of("done", "arrivals", 256, 64, {PLAIN: [ONE]})]}
    asyncio.run(never_slower.measure({"done": done, "left": left}, played(report)))
    assert measured == [("left", left)]
    asyncio.run(never_slower.measure({"left": left}, played(report, limit_s=0.0)))
    assert len(measured) == 1, "no time"


def test_the_grid_is_the_one_that_must_hold() -> None:
    cases = known_cases(Path("heads"))
    shapes, chats = {"8b-1.3", "8b-2.5", "8b-3.5", "9b-2.5", "30b-2.5"}, {"eagle3-chat", "standalone-chat"}
    assert set(cases) == {*shapes, *chats, "ngram-chat", "ngram-copy"}
    assert cases["8b-1.3"].batches == (1, 8, 24, 32, 100, 128, 200, 256) and cases["8b-1.3"].lengths == (64, 256)
    assert not any("speculative_num_steps" in case.flags for case in cases.values()), "default numbers"
    assert cases["standalone-chat"].batches == (1, 32, 128) and "standalone-chat" not in known_cases(None)


def test_a_record_knows_how_many_rows_a_case_has() -> None:
    for mean, rows in SLOWER_ROWS.items():
        case = known_cases(None)[f"8b-{mean}"]
        cells = len(case.batches) * len(case.lengths) + len(case.batches) // 2
        assert rows == cells + len(case.turns) + 2 * len(case.falling) + len(case.fixed) * len(FIXED_BATCHES)


def test_windows_of_drafts_are_medians_over_plain_decoding_of_the_same_prompts() -> None:
    def runs(*speeds: float, shares: tuple[float, ...] = ()) -> list[dict[str, Any]]:
        of_all = {"accept_length": 1.0 + sum(shares), "accepted_by_position": [*shares, 0.0]}
        return [of_all | {"step_ms": 1 / speed, "tokens_per_second": speed} for speed in speeds]

    plain, chain = Window("plain", (0, 1, 1)), Window("EAGLE3", (3, 1, 4), 8)
    found = {(plain, "chat20"): runs(10, 30, 20), (chain, "chat20"): runs(60, 30, 90, shares=(0.5, 0.0, 0.25))}
    found |= {(plain, "copy20"): runs(40), (chain, "copy20"): runs(20)}
    rows = rows_of(found, {"kind": "EAGLE3", "commit": "abc"})
    assert [row["over_plain"] for row in rows] == [1.0, 3.0, 1.0, 0.5]
    assert [row["accepted_by_position"] for row in rows] == [[], [0.5, 0.0, 0.25], [], []]
    assert rows[1] | {"accept_length": 1.75, "copied": 8, "turns": 3, "commit": "abc", "step_ms": 0.0167} == rows[1]


def test_runs_of_other_kinds_are_joined_if_they_had_the_same_prompts_and_time(tmp_path: Path) -> None:
    files = [str(tmp_path / f"{name}.json") for name in "abc"]
    for file, limit in zip(files, ("8m", "8m", "1m"), strict=True):
        report = {"run": {"device": "H200"}, "time_limit": limit, "prompts_sha256": "1", "rows": [{"commit": file}]}
        Path(file).write_text(json.dumps(report))
    assert [row["commit"] for row in joined(files[:2])["rows"]] == files[:2]
    with pytest.raises(SystemExit, match="different devices, times or prompts"):
        joined(files)


def test_a_draft_that_is_kept_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[tuple[str, ...]]()

    def train(*words: str) -> str:
        called.append(words)
        return "draft: 1,024 steps"

    monkeypatch.setattr(drafters, "called", train)
    (tmp_path / "prompts.jsonl").write_text("{}")
    given = argparse.Namespace(train="8m", prompts=str(tmp_path / "prompts.jsonl"))
    first = trained("DFLASH", tmp_path, given, ["--model-path", "smollm2"])
    assert first is not None and first["training_steps"] == 1024
    assert trained("DFLASH", tmp_path, given, []) == first and len(called) == 1
    assert called[0][-4:] == ("--time-limit", "8m", "--model-path", "smollm2")
    given.train = "9m"
    with pytest.raises(SystemExit, match="in another time"):
        trained("DFLASH", tmp_path, given, [])


def test_seeds_of_a_draft_that_learns_are_joined_and_keep_their_commits() -> None:
    def beside(without: float, learns: float) -> dict[str, Any]:
        speeds = {"without": (without, 100.0), "learns": (learns, 98.0)}
        return {
            name: {"records": length, "records_last": length, "tokens_per_second": speed, "faults": 0}
            for name, (length, speed) in speeds.items()
        }

    trained = {"records": 4.0, "faults": 0}
    first = {"run": {"commit": "a"}, "parts": {"trained/0": trained, "beside/0": beside(3.0, 3.4)}}
    later = {"run": {"commit": "b"}, "parts": {"trained/0": trained, "beside/2": beside(2.0, 3.0)}}
    found = adapt_draft.joined([first, later])
    assert {name: part["commit"] for name, part in found["parts"].items()} == {
        "trained/0": "a", "beside/0": "a", "beside/2": "b"
    }  # fmt: skip
    told = [(row["seed"], row["gained"], row["trained_on"], row["throughput"]) for row in found["summary"]]
    assert told == [(0, 0.4, 0, 0.98), (2, 0.5, 0, 0.98)] and found["run"]["commit"] == "b"

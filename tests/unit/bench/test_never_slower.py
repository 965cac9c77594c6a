"""Never slower: a cell's speed, its ratios, and a report that is gone on with."""

import argparse
import asyncio
import dataclasses
import json
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import adapt_draft
import drafters
import grid.calls
import never_slower
import pytest
from drafters import Window, joined, rows_of, trained
from grid.calls import WAVES, Load, Progress
from grid.cases import (
    BATCHES,
    CONTEXT_LENGTH,
    FALLS,
    FIXED,
    FIXED_BATCHES,
    HIGH,
    LENGTHS,
    LOW,
    Case,
    accepting,
    drawn,
    known_cases,
    longest,
    of_one_method,
)
from grid.report import AGAIN, DEFAULT, PLAIN, SPEEDS, Run, is_whole, row_of
from never_slower import Together, measure_defaults, measure_fixed
from records.parts import ROUNDS, SLOWER_CASES, grid_whole

from overlap_spec.bench.workload import RANDOM
from overlap_spec.errors import OverlapSpecError

ONE = dict.fromkeys(SPEEDS, 1.0)


def played(report: dict[str, Any], output: Path | None = None, limit_s: float = 1e9) -> Run:
    return Run(report, None if output is None else str(output), limit_s, rounds=3)


def test_speed_is_of_the_middle_half(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(grid.calls.time, "perf_counter", lambda: next(clock))
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


def test_ratios_are_of_medians_and_plain_decoding_has_its_slowest_round_beside_it() -> None:
    def runs(*speeds: float) -> list[dict[str, Any]]:
        return [{"call": speed, "answers": 10 * speed, "engine": 2 * speed + 10} for speed in speeds]

    row = row_of("8b-2.5", "cell", 8, 64, {DEFAULT: runs(9, 30, 15), PLAIN: runs(10, 9, 20)})
    assert row["over_plain"]["call"] == row["over_plain"]["answers"] == {DEFAULT: 1.5, AGAIN: 0.9}
    assert row["over_plain"]["engine"] == {DEFAULT: 1.3333, AGAIN: 0.9333}
    assert row["plain"] == {"call": 10, "answers": 100, "engine": 30}
    assert AGAIN not in row_of("8b-2.5", "cell", 8, 64, {DEFAULT: runs(9), PLAIN: runs(9)})["over_plain"]["call"]


def test_numbers_that_cannot_commit_so_much_commit_what_they_can() -> None:
    assert [longest(numbers) for numbers in FIXED.values()] == [2, 4, 6]
    assert accepting(3.5, 1.3, most=2) == {"speculative_simulate_acc_len": (2, 1.3)}


class Played(Together):
    """Calls are noted, and take one second more each time. No engine runs."""

    def __init__(self, cases: dict[str, Case], run: Run) -> None:
        self.cases, self.run, self.clients = cases, run, {}
        self.calls: list[tuple[str, int, int, tuple[int, ...]]] = []

    async def call(self, key: str, load: Load, name: str) -> dict[str, Any] | None:
        if len(self.calls) >= self.run.ends_at:
            return None
        self.calls.append((key, load.batch, load.num_tokens, load.seeds))
        return dict.fromkeys(SPEEDS, float(len(self.calls)))


FEW: dict[str, Any] = {"batches": (1, 8), "lengths": (64, 256)}


def test_cases_have_plain_decoding_in_common_and_none_is_always_first(tmp_path: Path) -> None:
    cases = {name: Case({}, RANDOM, **FEW) for name in ("a", "b")}
    played_ = Played(cases, played({"rows": []}, tmp_path / "report.json"))
    asyncio.run(measure_defaults(played_))
    cells, of_round = drawn(cases), [call[0] for call in played_.calls]
    assert [call[1:3] for call in played_.calls[:36]] == [cell for _ in range(3) for cell in cells for _ in range(3)]
    assert [of_round[i : i + 3] for i in (0, 12, 24)] == [["a", "b", PLAIN], ["b", PLAIN, "a"], [PLAIN, "a", "b"]]
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert len(rows) == 2 * 4 + 2, "cells, and arrivals of 8"
    assert {len(row["runs"][PLAIN]) for row in rows if row["kind"] == "cell"} == {3}
    assert rows[0]["runs"][PLAIN] == rows[1]["runs"][PLAIN], "of both cases"
    assert all(is_whole(name, case, played_.run) for name, case in cases.items())


def test_other_prompts_have_plain_decoding_of_their_own() -> None:
    cases = {"chat": Case({}, "chat20", **FEW), "copy": Case({}, "copy20", **FEW)}
    engines = Played(cases, played({"rows": []}))
    asyncio.run(engines.round("cell", Load(1, 64), list(cases), 1))
    assert [call[0] for call in engines.calls] == [PLAIN, "chat", PLAIN, "copy"]


def test_a_report_is_gone_on_with_where_it_was_cut_off() -> None:
    """The last round was cut off after five calls: it begins anew, and nothing before it is measured again."""
    cases = {"a": Case({}, RANDOM, **FEW, turns=(8, 1), falling=(8,))}
    engines = Played(cases, played({"rows": []}, limit_s=2 * 4 * 2 + 5))
    asyncio.run(measure_defaults(engines))
    assert [engines.run.rounds_of("a", "cell", *cell) for cell in drawn(cases)] == [3, 3, 2, 2]
    assert not is_whole("a", cases["a"], engines.run)
    again = Played(cases, dataclasses.replace(engines.run, ends_at=1e9))
    asyncio.run(measure_defaults(again))
    assert [call[1:3] for call in again.calls[:4]] == [cell for cell in drawn(cases)[2:] for _ in range(2)]
    assert [call[:2] for call in again.calls[4:8]] == [("a", 8), (PLAIN, 8), ("a", 1), (PLAIN, 1)], "turns"
    falls = [("a", FALLS["high"]), ("a", FALLS["low"]), ("a", FALLS["mixed"]), (PLAIN, (0,))]
    assert [(call[0], call[3]) for call in again.calls[8:12]] == falls
    assert is_whole("a", cases["a"], again.run)


def test_fixed_numbers_have_the_acceptance_of_every_case_by_seeds() -> None:
    cases = {name: Case({}, RANDOM, **FEW, fixed=FIXED) for name in ("a", "b")}
    engines = Played(cases, played({"rows": []}))
    asyncio.run(measure_defaults(engines))
    assert not is_whole("a", cases["a"], engines.run)
    engines.calls.clear()
    for key in FIXED:
        asyncio.run(measure_fixed(engines, key))
    assert engines.calls[:2] == [("fixed 2", 1, 256, (seed,)) for _, seed in (HIGH, LOW)]
    assert is_whole("b", cases["b"], engines.run)


def test_fixed_numbers_of_a_mixture_have_the_low_acceptance_too() -> None:
    case = Case({}, RANDOM, **FEW, fixed=FIXED, falling=(8,), fixed_batches=(8,), of_low=True)
    engines = Played({"a": case}, played({"rows": []}))
    asyncio.run(measure_defaults(engines))
    engines.calls.clear()
    for key in FIXED:
        assert not is_whole("a", case, engines.run)
        asyncio.run(measure_fixed(engines, key))
    assert engines.calls[:2] == [("fixed 2", 8, 256, (seed,)) for _, seed in (HIGH, LOW)]
    assert is_whole("a", case, engines.run)
    for kind, beside in (("fixed 2", "cell"), ("low 2", "low")):
        found, plain = (engines.run.row("a", each, 8, 256) for each in (kind, beside))
        assert found is not None and plain is not None
        assert found["plain"] == plain["plain"] and list(found["over_plain"]["call"]) == ["fixed 2"]


class Started(Played):
    """Starts are noted, too."""

    def __init__(self, cases: dict[str, Case], run: Run) -> None:
        super().__init__(cases, run)
        self.starts = list[tuple[str, bool]]()  # with whether another one is beside it

    async def start(self, stack: AsyncExitStack, key: str) -> None:
        self.starts.append((key, bool(self.clients)))
        self.clients[key] = cast(Any, None)
        stack.callback(self.clients.pop, key)
        await asyncio.sleep(0)


def test_fixed_numbers_start_together_once_default_numbers_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more engines at once than there were with plain decoding, which is not needed again."""
    made = list[Started]()
    monkeypatch.setattr(never_slower, "Together", lambda *of: made.append(Started(*of)) or made[-1])
    few = FEW | {"fixed": FIXED, "at_once": 1}
    cases, report = {"a": Case({}, RANDOM, **few)}, dict[str, Any](rows=[])
    asyncio.run(never_slower.measure_together(cases, played(report)))
    wanted = [(PLAIN, False), ("a", True), ("fixed 2", False), ("fixed 4", True), ("fixed 8", False)]
    assert made[0].starts == wanted and not made[0].clients
    assert is_whole("a", cases["a"], made[0].run)
    rows = report["rows"]
    report["rows"] = [row for row in rows if row["kind"] != "fixed 8"]
    assert not is_whole("a", cases["a"], made[0].run)
    asyncio.run(never_slower.measure_together(cases, played(report)))
    assert made[1].starts == wanted[2:] and [call[0] for call in made[1].calls] == ["fixed 8"]
    some = {"a": dataclasses.replace(cases["a"], only=(8,))}
    asyncio.run(never_slower.measure_together(some, played({"rows": []})))
    assert made[2].starts == wanted[:2], "cells alone"


def test_cases_of_one_method_share_engines_of_fixed_numbers() -> None:
    cases = known_cases(None)
    small = ("eagle3-chat", "ngram-chat", "ngram-copy")
    assert of_one_method({name: cases[name] for name in ("8b-2.5", "8b-1.3")}) == [["8b-2.5", "8b-1.3"]]
    assert of_one_method({name: cases[name] for name in small}) == [["eagle3-chat"], ["ngram-chat", "ngram-copy"]]
    other = dataclasses.replace(cases["8b-standalone"], fixed=FIXED)
    assert of_one_method({"8b-3.5": cases["8b-3.5"], "other": other}) == [["8b-3.5"], ["other"]]
    engines = Played({name: cases[name] for name in small}, played({"rows": []}))
    engines.bounds = {"max_total_tokens": 5000}
    some = engines.some(["ngram-chat", "ngram-copy"])
    config = some.config("fixed 12")
    assert (config.speculative_algorithm, config.speculative_num_draft_tokens) == ("NGRAM", 12)
    assert config.speculative_simulate_acc_len is None and config.max_total_tokens == 5000 and not some.clients


def test_requests_of_both_acceptances_come_by_turns() -> None:
    seeds = Load(2, 256, waves=2, seeds=FALLS["mixed"]).all_seeds()
    assert [seed >= LOW[1] for seed in seeds] == [False, True, False, True] and len({*seeds}) == 4


def test_no_request_gets_another_acceptance_as_its_answer_grows() -> None:
    """It goes by seed + position. Of 256 requests the last two had the low one, and ended long after the others."""
    seeds = Load(max(BATCHES), max(LENGTHS), waves=WAVES).all_seeds()
    assert max(seeds) + CONTEXT_LENGTH <= LOW[1] and len({*seeds}) == len(seeds)


def test_cells_of_some_batches_keep_their_order_and_are_all_that_is_measured() -> None:
    """In the whole grid 24 requests of 64 tokens come after 32 of 256, so what was learnt there is what they meet."""
    whole = known_cases(None)["8b-1.3"]
    some, run = dataclasses.replace(whole, only=(24, 32)), played({"rows": []})
    assert drawn({"a": some}) == [cell for cell in drawn({"a": whole}) if cell[0] in (24, 32)]
    for cell in some.cells():
        assert not is_whole("8b-1.3", some, run)
        run.add(row_of("8b-1.3", "cell", *cell, {PLAIN: [ONE] * 3}))
    assert is_whole("8b-1.3", some, run) and not is_whole("8b-1.3", whole, run)


def test_reports_of_one_device_are_joined_without_their_runs(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a", "b", "c")]
    for case, device in (("a", "H200"), ("b", "H200"), ("c", "H100")):
        rows = [row_of(case, "cell", batch, 64, {DEFAULT: [ONE] * 3, PLAIN: [ONE] * 3}) for batch in (8, 1)]
        rows += [row_of(case, f"turn {i}", 8, 256, {DEFAULT: [ONE], PLAIN: [ONE]}) for i in range(2)]
        rows.append(row_of(case, "fixed 4", 8, 256, {"fixed 4": [dict.fromkeys(SPEEDS, 1.5)], PLAIN: [ONE]}))
        report = {"run": {"device": device}, "engines": {case: {PLAIN: {"start_s": 17.0}}}, "rows": rows}
        (tmp_path / case).write_text(json.dumps(report))
    found = never_slower.joined(files[:2])
    two = {"plain": [1.0, 1.0], "call": [1.0, 1.0], "engine": [1.0, 1.0]}
    again = {"call_again": [1.0, 1.0], "engine_again": [1.0, 1.0]}
    assert found["rows"][:3] == [
        {"case": "a", "kind": "cell", "batch": [8, 1], "num_tokens": [64, 64], "rounds": 3, **two, **again},
        {"case": "a", "kind": "turns", "batch": [8, 8], "num_tokens": [256, 256], "rounds": 1, **two},
        {"case": "a", "kind": "fixed 4", "batch": [8], "num_tokens": [256], "rounds": 1}
        | {"plain": [1.0], "call": [1.5], "engine": [1.5]},
    ]
    assert [row["case"] for row in found["rows"][3:]] == ["b"] * 3
    assert found["starts_s"] == {"a": {PLAIN: 17.0}, "b": {PLAIN: 17.0}}
    with pytest.raises(SystemExit, match="different devices"):
        never_slower.joined(files)


def test_as_many_cases_as_a_device_holds_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[str]] = []

    async def note(cases: dict[str, Case], run: Run) -> None:
        measured.append(list(cases))

    monkeypatch.setattr(never_slower, "measure_together", note)
    names = ("8b-2.5", "8b-1.3", "ngram-chat", "8b-3.5", "eagle3-chat")
    cases, done = {name: known_cases(None)[name] for name in names}, Case({}, RANDOM, **FEW, only=(1,))
    report = {"rows": [row_of("done", "cell", *cell, {PLAIN: [ONE] * 3}) for cell in done.cells()]}
    asyncio.run(never_slower.measure({"done": done, **cases}, played(report)))
    assert measured == [["8b-2.5", "8b-1.3"], ["8b-3.5"], ["ngram-chat", "eagle3-chat"]]
    asyncio.run(never_slower.measure(cases, played(report, limit_s=0.0)))
    assert len(measured) == 3, "no time"


def test_the_grid_is_the_one_that_must_hold() -> None:
    cases = known_cases(Path("heads"))
    shapes = {"8b-1.3", "8b-2.5", "8b-2.5-in-order", "8b-3.5", "8b-standalone", "9b", "30b", "30b-int4"}
    assert set(cases) == {*shapes, "eagle3-chat", "standalone-chat", "ngram-chat", "ngram-copy"}
    assert cases["8b-1.3"].batches == (1, 8, 24, 32, 100, 128, 200, 256) and cases["8b-1.3"].lengths == (64, 256)
    assert not any("speculative_num_steps" in case.flags for case in cases.values()), "default numbers"
    assert cases["8b-standalone"].batches == cases["standalone-chat"].batches == (
        1,
        32,
        128,
    ) and "standalone-chat" not in known_cases(None)


def test_a_record_knows_how_many_rows_a_case_has() -> None:
    for names, _, rows in SLOWER_CASES.values():
        found = 0
        for case in (known_cases(None)[name] for name in names.split(",")):
            found += len(case.cells()) + len(case.batches) // 2 + len(case.turns) + len(FALLS) * len(case.falling)
            found += len(case.fixed) * len(FIXED_BATCHES)
        assert rows == found
    row = row_of("a", "cell", 1, 64, {PLAIN: [ONE] * ROUNDS})
    assert grid_whole(1)({"rows": [row]}) and not grid_whole(2)({"rows": [row]})
    assert not grid_whole(1)({"rows": [row_of("a", "cell", 1, 64, {PLAIN: [ONE]})]})


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
    monkeypatch.setattr(drafters, "describe_run", lambda *_: {"commit": "c0ffee"})  # it would hash all code
    (tmp_path / "prompts.jsonl").write_text("{}")
    given = argparse.Namespace(train="8m", prompts=str(tmp_path / "prompts.jsonl"))
    first = trained("DFLASH", tmp_path, given, ["--model-path", "smollm2"])
    assert first is not None and first["training_steps"] == 1024 and first["trained_at"] == "c0ffee"
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
    assert told == [(0, 0.4, 0, 0.98), (2, 0.5, 0, 0.98)] and found["run"]["commit"] == "a"


def test_a_draft_that_learns_tells_of_a_fault_what_runs_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(faults: int, path: Path | None) -> dict[str, Any]:
        recent = [{"margin": 0.01}, {"margin": 0.9}, {"margin": None}] * 10
        report = {"figures": {"tokens": 9, "faults": faults}, "recent": recent, "fault_file": path and str(path)}
        service = SimpleNamespace(get=lambda _: SimpleNamespace(json=lambda: report))
        traffic: Any = SimpleNamespace(tokens_per_second=lambda: 1.0)
        window = {"seconds": 5.0, "accept_length": 2.0, "learning": 0.0}
        return adapt_draft.told(cast(Any, service), traffic, [window], [window])

    monkeypatch.setattr(adapt_draft.time, "sleep", lambda _: None)
    (tmp_path / "faults.jsonl").write_text('{"prompt_ids": [5]}\n{"prompt_ids": [6]}\n')
    audit = told(2, tmp_path / "faults.jsonl")["audit"]
    assert [each["prompt_ids"] for each in audit["records"]] == [[5], [6]]
    assert [each["margin"] for each in audit["recent"]] == [None] * 10 + [0.9] * 10
    assert told(1, None)["audit"]["records"] == [] and "audit" not in told(0, None)

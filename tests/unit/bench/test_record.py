"""Records of a card: what is measured again, what a part that was cut off keeps, and what a reader takes for whole."""

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import record
from documents.result_tables import DEFAULT_NUMBERS
from records.measure import Machine
from records.parts import MOST_S, PARTS, TABLES, Command, Part, all_passed, has_cells, parts_of
from records.reader import (
    NO_RECORD,
    MixedCards,
    Record,
    card_of,
    commit_of,
    newest_complete,
    sentence,
    without_age,
)

from overlap_spec.bench import report
from overlap_spec.runtime.source import PACKAGES, UNKNOWN, Source, git_hash

H200, H100 = Machine("NVIDIA H200", "580.1"), Machine("NVIDIA H100 80GB HBM3", "580.1")
BENCH = """
import json, pathlib, sys, time
name, seconds, status, output = sys.argv[1:]
with open("calls", "a") as calls:
    calls.write(name + " ")
before = json.loads(pathlib.Path(output).read_text()) if pathlib.Path(output).exists() else {"rows": []}
pathlib.Path(output).write_text(json.dumps({"rows": [*before["rows"], name]}))
time.sleep(float(seconds))
print("the reason")
sys.exit(int(status))
"""


def command(name: str, seconds: int = 1, sleep_s: float = 0.0, status: int = 0, **more: object) -> Command:
    return replace(Command(name, seconds, f"python bench.py {name} {sleep_s} {status} {{output}}"), **more)


ONE = Part("one", (command("a"), command("b")), ("overlap_spec/worker.py",), ("h200", "h100"))
TWO = Part("two", (command("c"),), ("overlap_spec/server.py",))
TABLE = (ONE, TWO)


def git(top: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    done = subprocess.run(["git", *identity, *arguments], cwd=top, check=True, capture_output=True, text=True)
    return done.stdout.strip()


class Tree:
    """A repository with two files of code, and what `record.py` does in it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.results, self._capsys = root, root / "benchmarks/results", capsys
        for name in ("overlap_spec/worker.py", "overlap_spec/server.py", "kernels/overlap_spec_kernels/op.py"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("A = 1\n")
        (root / "bench.py").write_text(BENCH)
        (root / ".gitignore").write_text("calls\n")
        git(root, "init", "-q")
        self.commit()

    def commit(self) -> str:
        git(self.root, "add", ".")
        git(self.root, "commit", "-qm", "all", "--allow-empty")
        return git(self.root, "rev-parse", "--short=12", "HEAD")

    def change(self, name: str, text: str) -> str:
        (self.root / name).write_text(text)
        return self.commit()

    def record(self, *words: str, machine: Machine = H200, table: tuple[Part, ...] = TABLE) -> tuple[int, str]:
        """Exit status and what is printed."""
        status = record.main(list(words), self.root, table, machine)
        return status, self._capsys.readouterr().out

    def errors(self) -> str:
        return self._capsys.readouterr().err

    def calls(self) -> list[str]:
        """Commands that were run since this was asked last."""
        path = self.root / "calls"
        found = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    def states(self, card: str = "h200", table: tuple[Part, ...] = TABLE) -> list[str]:
        _, text = self.record("--list", "--card", card, table=table)
        return [line[12:20].strip() for line in text.splitlines()[:-1]]

    def newest(self, card: str = "h200") -> Record | None:
        return newest_complete(self.results, card)

    def files(self) -> list[str]:
        return sorted(path.name.partition("-")[0] for path in self.results.rglob("*.json"))


@pytest.fixture
def tree(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Of this project's own source, which takes 0.3 s to hash, nothing comes into a part: it has the tree's."""
    monkeypatch.setattr(report, "describe_source", lambda more: Source("this project's", {}, {}))
    return Tree(tmp_path, capsys)


@pytest.mark.slow
def test_a_part_is_one_file_that_names_all_it_is_of(tree: Tree) -> None:
    status, text = tree.record()
    assert status == 0 and tree.calls() == ["a", "b", "c"]
    assert "one 2/2 b: about 1 s, 53" in text
    assert sorted(path.parent.name for path in tree.results.rglob("*")) == ["h200"] * 2 + ["results"]
    found = tree.newest()
    assert found is not None and found.report("one", "b") == {"rows": ["b"]}
    file = found.parts["one"]
    assert (file["card"], file["run"]["device"], file["run"]["driver"]) == ("h200", "NVIDIA H200", "580.1")
    assert file["run"]["versions"]["torch"] and file["run"]["python"] and file["run"]["source"]["trees"]
    assert set(file["depends"]) == {"overlap_spec/worker.py"} and file["digest"] == file["record"]["one"]
    assert file["commands"]["a"]["command"] == ONE.commands[0].words


@pytest.mark.slow
def test_only_what_the_code_has_left_behind_is_measured_again(tree: Tree) -> None:
    assert tree.states() == ["missing", "missing"]
    tree.record()
    tree.calls()
    assert tree.states() == ["fresh", "fresh"]
    tree.change("overlap_spec/worker.py", '"""Prose."""\nA = 1  # one\n')
    assert tree.states() == ["fresh", "fresh"]
    assert tree.record()[0] == 0 and tree.calls() == []
    tree.change("overlap_spec/worker.py", "A = 2\n")
    assert tree.states() == ["stale", "fresh"]
    assert tree.record()[0] == 0 and tree.calls() == ["a", "b"]
    assert tree.states() == ["fresh", "fresh"]


@pytest.mark.slow
def test_another_command_makes_a_part_stale(tree: Tree) -> None:
    tree.record()
    assert tree.states(table=(ONE, replace(TWO, commands=(command("d"),)))) == ["fresh", "stale"]
    assert tree.states(table=(replace(ONE, depends=TWO.depends), TWO)) == ["stale", "fresh"]


def test_a_record_is_complete_once_all_parts_agree_with_one_tree(tree: Tree) -> None:
    tree.record("--parts", "one")
    assert tree.newest() is None, "a part alone is no record"
    tree.change("README.md", "no part depends on it\n")
    whole = tree.record("--parts", "two") and tree.newest()
    assert whole and whole.run == whole.parts["two"]["run"], "no matter when each was measured"
    tree.change("overlap_spec/worker.py", "A = 2\n")
    tree.change("overlap_spec/server.py", "A = 2\n")
    tree.record("--parts", "one")
    assert tree.newest() == whole, "until the other part is of the new tree as well"
    tree.record("--parts", "two")
    newer = tree.newest()
    assert newer is not None and newer.run["commit"] != whole.run["commit"] and len(tree.files()) == 4


def test_who_ends_it_ends_what_it_has_started(tree: Tree) -> None:
    slow = replace(ONE, commands=(command("a", sleep_s=60.0),))
    started = tree.root / "calls"

    def end() -> None:
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(SystemExit) as left:
        tree.record(table=(slow,))
    thread.join()
    assert left.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before
    running = subprocess.run(["pgrep", "-f", str(tree.root)], capture_output=True, text=True, check=False)
    assert not running.stdout, "its command has ended"


def test_what_was_cut_off_is_no_record_and_goes_on(tree: Tree) -> None:
    slow = replace(ONE, commands=(command("a"), command("b", sleep_s=60.0)))
    status, text = tree.record("--limit-s", "8", table=(slow,))
    assert status == 1 and "one is not whole: b was cut off: the time is over" in text
    assert tree.files() == ["a.json", "b.json", "state.json"] and tree.newest() is None
    assert tree.states(table=(slow,)) == ["cut off"]
    assert tree.record("--list", table=(slow,))[1].startswith("one         cut off     2 s, 1 s are left\n")
    assert tree.record("--limit-s", "8", table=(slow,))[0] == 1 and tree.calls() == ["a", "b", "b"]
    assert json.loads(next(tree.results.rglob("b.json")).read_text()) == {"rows": ["b"]}, "begun anew"


@pytest.mark.slow
def test_a_command_that_resumes_keeps_its_report_with_the_same_source_only(tree: Tree) -> None:
    def told_to_fail(count: int) -> Part:
        return replace(ONE, commands=(command("a", whole=lambda report: len(report["rows"]) >= count, resumes=True),))

    assert "a wrote a report with gaps" in tree.record(table=(told_to_fail(3),))[1]
    tree.record(table=(told_to_fail(3),))
    assert len(json.loads(next(tree.results.rglob("a.json")).read_text())["rows"]) == 2
    tree.change("overlap_spec/worker.py", "A = 1  # the same code, but another tree\n")
    tree.record(table=(told_to_fail(3),))
    assert json.loads(next(tree.results.rglob("a.json")).read_text()) == {"rows": ["a"]}


@pytest.mark.parametrize("what", ["code", "device"])
def test_what_another_code_or_device_has_begun_is_thrown_away(tree: Tree, what: str) -> None:
    part = replace(ONE, commands=(command("a"), command("b", status=3)))
    assert "one is not whole: b ended with status 3\n  the reason" in tree.record(table=(part,))[1]
    if what == "code":
        tree.change("overlap_spec/worker.py", "A = 2\n")
    machine = H200 if what == "code" else Machine("NVIDIA H200 141GB", "")
    tree.record(table=(part,), machine=machine)
    assert tree.calls() == ["a", "b", "a", "b"]


def test_a_part_that_fails_does_not_stop_the_others(tree: Tree) -> None:
    status, _ = tree.record(table=(replace(ONE, commands=(command("a", status=1),)), TWO))
    assert status == 1 and tree.calls() == ["a", "c"]


@pytest.mark.slow
def test_cards_are_never_mixed(tree: Tree) -> None:
    tree.record()
    assert tree.newest("h100") is None and tree.states("h100") == ["missing"]
    tree.record(machine=H100)
    assert tree.states("h100") == ["fresh"], "a record of the parts that are of this card"
    assert {file.parts["one"]["run"]["device"] for file in (tree.newest("h100"), tree.newest()) if file} == {
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
    }
    moved = next(tree.results.glob("h100/*.json"))
    moved.rename(tree.results / "h200" / f"{moved.stem}x.json")
    with pytest.raises(MixedCards, match="was measured on NVIDIA H100 80GB HBM3"):
        tree.newest()


def test_two_devices_of_one_folder_make_no_record(tree: Tree) -> None:
    tree.record("--parts", "one")
    tree.record("--parts", "two", machine=Machine("NVIDIA H200 141GB", ""))
    assert tree.newest() is None


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H200", "h200"),
        (H100.device, "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
    ],
)
def test_folders_of_cards(device: str, card: str) -> None:
    assert card_of(device) == card


def test_what_is_refused_before_anything_runs(tree: Tree) -> None:
    assert tree.record(machine=Machine("", "")) == (1, "no GPU: the driver names none; nothing is measured\n")
    other = tree.record(machine=Machine("NVIDIA B200", ""))
    assert other == (1, "no part belongs to the record of b200; nothing is measured\n")
    head = git(tree.root, "rev-parse", "--short=12", "HEAD")
    (tree.root / "overlap_spec/worker.py").write_text("A = 3\n")
    words = f"the tree has changes that commit {head} does not have: commit them first; nothing is measured\n"
    assert tree.record() == (1, words)
    with pytest.raises(SystemExit, match="2"):
        tree.record("--list", machine=Machine("", ""))
    assert "no GPU: say whose parts with --card h100 or h200\n" in tree.errors()
    assert tree.calls() == [] and not tree.results.exists()


@pytest.mark.slow
def test_too_little_time_is_told_before_anything_runs(tree: Tree) -> None:
    long = replace(TWO, commands=(command("c", seconds=400),))
    status, text = tree.record("--limit-s", "100", table=(ONE, long))
    before, _, after = text.partition("one 1/2")
    assert "too little time: two takes about 400 s, 93 s are left for it" in before
    assert status == 1 and "two is not whole: no time for c: about 400 s, 9" in after
    assert tree.calls() == ["a", "b"] and tree.states(table=(ONE, long)) == ["fresh", "missing"]


@pytest.mark.slow
def test_a_machine_without_git(tree: Tree) -> None:
    """The reader finds the commit by the trees."""
    head = git(tree.root, "rev-parse", "--short=12", "HEAD")
    (tree.root / ".git").rename(tree.root / ".elsewhere")
    assert "no git and no manifest: files will not name a commit" in tree.record()[1]
    (tree.root / ".elsewhere").rename(tree.root / ".git")
    tree.change("overlap_spec/worker.py", "A = 2\n")
    trees = {name: git_hash(tree.root / name) for name in PACKAGES}
    assert commit_of(tree.root, trees) == git(tree.root, "rev-parse", "--short=12", "HEAD") != head
    assert commit_of(tree.root, trees | {PACKAGES[0]: "0"}) == UNKNOWN


def test_the_sentence_at_the_top(tree: Tree) -> None:
    tree.record()
    found = tree.newest()
    assert found is not None
    commit = found.run["commit"]
    hashes = found.parts["one"]["depends"] | found.parts["two"]["depends"]
    now = f"*Measured on one NVIDIA H200 at commit {commit}.*"
    assert sentence(found, hashes, tree.root, TABLE) == now
    tree.commit()
    assert sentence(found, hashes, tree.root, TABLE) == f"{now[:-2]}, 1 commit ago.*"
    tree.commit()
    changed = sentence(found, hashes | {"overlap_spec/server.py": "x"}, tree.root, TABLE)
    assert changed == f"{now[:-2]}, 2 commits ago; 1 of 2 parts are older than the code: two.*"
    assert without_age(changed) == now
    assert sentence(None, hashes, tree.root, TABLE) == NO_RECORD


def test_reports_with_gaps() -> None:
    turn = {"row": 7, "part": "turn", "value": 9.0}
    report = {"benchmark": "real_traffic", "cells": [turn], "failed": {}}
    assert has_cells(7)(report)
    assert not has_cells(6, 7)(report) and not has_cells(7)(report | {"failed": {"rows (7,)": "OutOfPages"}})
    assert all_passed({"files": {"a": {"passed": 1, "failed": 0}}})
    assert not all_passed({"files": {"a": {"passed": 1, "failed": 0}, "b": {"passed": 2, "failed": 1}}})
    assert not all_passed({"files": {"a": {"passed": 0, "failed": 0}}}) and not all_passed({})


def test_the_parts_of_the_project() -> None:
    root = Path(record.ROOT)
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert all(part.seconds <= MOST_S - 15 for part in PARTS), "each fits into one call"
    core = parts_of("h200")[:3]
    assert [part.name for part in core] == ["tests", "tables", "more_tables"] and parts_of("h100")
    assert sum(len(part.commands) for part in core[1:]) <= 12
    assert all(1.3 * part.seconds <= 400 for part in core[1:]), "on a slow host, too"
    reports = [command.name for part in core[1:] for command in part.commands]
    assert len(set(reports)) == len(reports) and DEFAULT_NUMBERS.split(", ")[1] in (each.name for each in TABLES)
    for part in PARTS:
        assert all((root / path).exists() for path in part.depends), part.name
        for each in part.commands:
            words = each.words.split()
            scripts = [word for word in words if word.startswith(("benchmarks/", "tests/"))]
            assert "{output}" in words and all((root / word).exists() for word in scripts), each.words
            assert words[0] == "overlap-spec" or words[1] == "-m" or words[1] in part.depends, each.words

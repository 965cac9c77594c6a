"""Planted faults apply to the tree as it is, and name tests that exist: a stale one is seen before they are all run."""

import ast
import functools
import re
from collections import Counter

import pytest
from faults import draw
from faults.run import HERE, ROOT, Fault, main, planted, with_fault

faults = functools.cache(planted)  # each process of a run collects this file, one needs them
BETWEEN = "\n\n\n"  # the parts of a formatted file, of which each can be read by itself
MOST_CHANGED = 3  # lines: a fault is one decision
FEWEST, FEWEST_IN_ROOM, FEWEST_DRAWN = 80, 4, 20
WITHOUT = {  # rooms that need no planted faults
    "": "the engine's parts, joined",
    "features": "a table of folders, which have theirs",
    "entrypoints/ray": "its tests need an environment of their own",
    "entrypoints": "a folder of folders",
    "entrypoints/otlp": "its tests need an extra",
}


@functools.cache
def named(path: str) -> frozenset[str]:
    """Functions and classes of a file of tests."""
    return frozenset(re.findall(r"^(?:async )?(?:def|class) (\w+)", text_of(path), re.MULTILINE))


@functools.cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text()


@functools.cache
def definitions(text: str) -> frozenset[str]:
    return frozenset(text.split(BETWEEN))


@pytest.mark.slow
def test_every_fault_applies_and_leaves_a_module_that_can_be_read() -> None:
    broken = []
    for fault in faults():
        right = text_of(fault.path)
        wrong = with_fault(right, fault)
        if wrong is None or fault.before == fault.after:
            broken.append(fault.name)
        elif fault.path.endswith(".py"):  # what is compiled elsewhere, the fault's own tests compile
            for changed in set(wrong.split(BETWEEN)) - definitions(right):
                ast.parse(changed)
    assert not broken, "\n".join(broken)


def test_every_fault_names_tests_that_exist() -> None:
    for fault in faults():
        assert fault.tests and fault.why.endswith("."), fault.name
        for test in fault.tests:
            path, _, function = test.partition("::")
            assert function.partition("[")[0] in {"", *named(path)}, test


def test_a_fault_is_one_decision_and_is_listed_once() -> None:
    assert len({(fault.path, fault.after) for fault in faults()}) == len(faults())
    for fault in faults():
        old, new = fault.before.splitlines(), fault.after.splitlines()
        changed = (Counter(old) - Counter(new)).total(), (Counter(new) - Counter(old)).total()
        assert max(changed) <= MOST_CHANGED, fault.name


def test_every_room_has_faults() -> None:
    found = Counter(fault.room for fault in faults())
    rooms = {path.parent.relative_to(draw.PACKAGE).as_posix() for path in draw.PACKAGE.rglob("*.py")}
    assert {"" if room == "." else room for room in rooms} | {"kernels"} <= found.keys() | WITHOUT.keys()
    needed = {room: count for room, count in found.items() if room not in WITHOUT}
    assert min(needed.values()) >= FEWEST_IN_ROOM and found.total() >= FEWEST, found
    assert sum(fault.drawn for fault in faults()) >= FEWEST_DRAWN


def test_a_fault_that_does_not_apply_is_noticed() -> None:
    fault = Fault("a.py", "a < b", "a <= b", (), "")
    assert with_fault("if a < b:", fault) == "if a <= b:"
    assert with_fault("if a > b:", fault) is None and with_fault("a < b and a < b", fault) is None


def test_words_that_no_fault_has_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Without faults there are no tests to name, and pytest would run all that there are."""
    with pytest.raises(SystemExit) as ended:
        main(["--only", "no-fault-has-this", "nor-this"])
    assert ended.value.code == 2 and "no-fault-has-this, nor-this" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = not a", ["x = a"]),
        ("x = a and b", ["x = a or b"]),
        ("x = max(a, b)", ["x = min(a, b)"]),
        ("x = a[0] + b", ["x = a[0]", "x = a[1] + b"]),
        ("x = (a) is None", ["x = (a) is not None"]),
        ("def f(a: int = 1) -> None:\n    assert a == 1\n    raise ValueError(f'{a + 1}')", []),
    ],
)
def test_what_is_drawn(text: str, changes: list[str]) -> None:
    module = draw.Module.of(text)
    assert [module.text[: edit.start] + edit.text + module.text[edit.end :] for edit in module.edits()] == changes


def test_what_is_drawn_names_one_place_of_its_file() -> None:
    for path, before, after in draw.drawn(seed=3, count=50, room="runtime"):
        assert (ROOT / path).read_text().count(before) == 1 and before != after


def test_tables_are_in_one_folder() -> None:
    assert {path.suffix for path in (HERE / "planted").iterdir()} == {".toml"}

"""Which failures of a copy without a folder are those of the folder's own tests (`tests/deletion/run.py`)."""

import pytest
from deletion.run import ENGINE, PACKAGE, ROOT, TESTS, asks_for, drawn, folders, gone_with

REFUSED = "E   RequestError: grammar: is of the feature 'grammar', which is not part of this installation"
BY_TEST = """tests/unit/x.py:5: in <module>
    from overlap_spec.features.grammar.compiler import compile
E   ModuleNotFoundError: No module named 'overlap_spec.features.grammar'"""
BY_ENGINE = """overlap_spec/worker/loop.py:5: in <module>
    from overlap_spec.features.grammar.messages import DropGrammar
E   ModuleNotFoundError: No module named 'overlap_spec.features.grammar'"""


@pytest.mark.parametrize(
    ("text", "is_own"), [(REFUSED, True), (BY_TEST, True), (BY_ENGINE, False), ("assert 1", False)]
)
def test_a_test_of_the_folder_names_it(text: str, is_own: bool) -> None:
    assert asks_for(["features/grammar"], text) == is_own
    assert not asks_for(["features/audit"], text)


def test_what_needs_a_folder_goes_with_it() -> None:
    assert gone_with("features/grammar") == ["features/grammar"]
    assert gone_with("entrypoints/cli") == ["entrypoints/cli", "entrypoints/top", "entrypoints/ray"]
    assert len(gone_with("entrypoints/http")) > 10


def test_folders_are_drawn_by_the_tree() -> None:
    assert len(set(drawn(2))) == 2
    assert drawn(2) == drawn(2)
    assert set(drawn(99)) == set(folders())


def test_what_is_checked_is_there() -> None:
    """A path that is not there would end the tests before the first one."""
    assert all((ROOT / place).exists() for place in TESTS)
    assert all((PACKAGE / place).exists() for place in ENGINE)

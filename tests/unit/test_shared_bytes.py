"""The guard in tests/conftest.py: a test that damages Python's shared bytes fails, and those after it do not."""

from pathlib import Path

import pytest
from support.shared_bytes import damaged, write

CONFTEST = Path(__file__).parent.parent / "conftest.py"
BELL, TEXT = 7, b"a\x07b"


def test_the_test_that_damages_them_fails_and_they_are_written_back(request: pytest.FixtureRequest) -> None:
    guard = request.config.pluginmanager.get_plugin(str(CONFTEST))
    assert guard is not None
    teardown = guard.pytest_runtest_teardown()
    next(teardown)
    write(BELL, 0)
    found, seen = damaged(), TEXT[1:2] in TEXT
    with pytest.raises(pytest.fail.Exception, match=r"shared bytes of the characters \[7\]"):
        teardown.send(None)
    assert found == [BELL] and not seen
    assert damaged() == [] and TEXT[1:2] == b"\a"


def test_it_says_nothing_of_other_tests(request: pytest.FixtureRequest) -> None:
    teardown = request.config.pluginmanager.get_plugin(str(CONFTEST)).pytest_runtest_teardown()
    next(teardown)
    with pytest.raises(StopIteration):
        teardown.send(None)

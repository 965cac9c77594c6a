"""The table of features: what is there attaches in the table's order, what is not there is left out."""

import sys
from pathlib import Path

import pytest

from overlap_spec import features


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of features."""
    for name in [each for each in sys.modules if each.startswith("overlap_spec.features.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(features, "__path__", [str(tmp_path)])
    monkeypatch.setattr(features, "NAMES", ("second", "first", "gone"))
    return tmp_path


def test_modules_come_in_the_tables_order_and_only_of_folders_that_are_there(place: Path) -> None:
    for name, kinds in {"first": ("worker", "scheduler"), "second": ("scheduler",), "other": ("scheduler",)}.items():
        (place / name).mkdir()
        (place / name / "__init__.py").write_text("")
        for kind in kinds:
            (place / name / f"{kind}.py").write_text(f"NAME = '{name}'\n")
    try:
        assert [each.NAME for each in features.modules(features.SCHEDULER)] == ["second", "first"]
        assert [each.NAME for each in features.modules(features.WORKER)] == ["first"]
        assert features.modules(features.FRONTEND) == []
    finally:
        for name in [each for each in sys.modules if each.startswith("overlap_spec.features.")]:
            del sys.modules[name]

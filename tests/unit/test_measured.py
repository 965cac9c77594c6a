"""What a start measures is kept for the next one, for this machine only, and never in the way."""

from pathlib import Path

import pytest

from overlap_spec import measured
from overlap_spec.measured import keep, recall


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OVERLAP_SPEC_CACHE", str(tmp_path))
    return tmp_path


def only_file(cache: Path) -> Path:
    (path,) = (cache / "measured").iterdir()
    return path


def test_what_was_kept_is_recalled_by_name_and_by_what_it_depends_on() -> None:
    keep("spin", 2, 3000)
    assert recall("spin", 2, int) == 3000
    assert recall("spin", 3, int) is None
    assert recall("other", 2, int) is None


@pytest.mark.parametrize(
    ("name", "other"), [("processor_name", "another"), ("num_cores", 77), ("torch_version", "0.1")]
)
def test_another_machine_measures_itself(name: str, other: object, monkeypatch: pytest.MonkeyPatch) -> None:
    keep("spin", 2, 3000)
    monkeypatch.setattr(measured, name, lambda: other)
    assert recall("spin", 2, int) is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b'"many"', b"[1, 2]"])
def test_a_damaged_file_is_as_good_as_none(content: bytes, cache: Path) -> None:
    keep("spin", 2, 3000)
    only_file(cache).write_bytes(content)
    assert recall("spin", 2, int) is None
    keep("spin", 2, 1000)
    assert recall("spin", 2, int) == 1000


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("OVERLAP_SPEC_CACHE", str(cache / "file"))
    keep("spin", 2, 3000)
    assert recall("spin", 2, int) is None


def test_nothing_half_written_is_left(cache: Path) -> None:
    keep("spin", 2, 3000)
    keep("spin", 2, 1000)
    assert only_file(cache).read_bytes() == b"1000"

"""What a start measures is kept for the next one, for this machine only, and never in the way."""

import os
from pathlib import Path

import pytest

from overlap_spec.runtime import measured
from overlap_spec.runtime.measured import keep, once, recall, seconds_of_others


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


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b'"many"', b"[1, 2]", b"3000"])
def test_a_damaged_file_is_as_good_as_none(content: bytes, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep("spin", 2, 3000)
    only_file(cache).write_bytes(content)
    assert recall("spin", 2, int) is None
    assert f"{only_file(cache)} is ignored, and measured anew: " in caplog.text
    keep("spin", 2, 1000)
    assert recall("spin", 2, int) == 1000


def test_a_figure_of_another_type_is_as_good_as_none(caplog: pytest.LogCaptureFixture) -> None:
    keep("spin", 2, "many")
    assert recall("spin", 2, int) is None and "is ignored" in caplog.text


def test_a_file_of_other_settings_is_ignored_under_any_name(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep("spin", 2, 3000)
    other = only_file(cache).read_bytes()
    keep("spin", 3, 1000)
    for path in (cache / "measured").iterdir():
        path.write_bytes(other)
    assert recall("spin", 2, int) == 3000 and recall("spin", 3, int) is None
    assert "of other settings" in caplog.text


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_have_written_is_ignored(
    mode: int, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep("spin", 2, 3000)
    only_file(cache).chmod(mode)
    assert recall("spin", 2, int) is None and "another user" in caplog.text


def test_a_file_of_another_user_is_ignored(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    keep("spin", 2, 3000)
    own, stat = os.geteuid(), os.fstat
    monkeypatch.setattr(measured.os, "fstat", lambda file: os.stat_result((*stat(file)[:4], 1234, *stat(file)[5:])))
    assert recall("spin", 2, int) is None and "another user" in caplog.text
    monkeypatch.setattr(measured.os, "geteuid", lambda: 1234)
    assert recall("spin", 2, int) == 3000 and own != 1234


def test_a_link_to_another_file_is_ignored(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep("spin", 2, 3000)
    path = only_file(cache)
    path.rename(cache / "elsewhere")
    path.symlink_to(cache / "elsewhere")
    assert recall("spin", 2, int) is None and "is ignored" in caplog.text


def test_what_was_never_kept_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert recall("spin", 2, int) is None and not caplog.records


def test_only_this_user_reads_and_writes_what_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_SPEC_CACHE", str(cache / "new"))
    keep("spin", 2, 3000)
    path = only_file(cache / "new")
    assert [each.stat().st_mode & 0o777 for each in (path, path.parent, cache / "new")] == [0o600, 0o700, 0o700]


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("OVERLAP_SPEC_CACHE", str(cache / "file"))
    keep("spin", 2, 3000)
    assert recall("spin", 2, int) is None


def test_nothing_half_written_is_left(cache: Path) -> None:
    keep("spin", 2, 3000)
    keep("spin", 2, 1000)
    assert only_file(cache).read_bytes().endswith(b'"figure":1000}')


@pytest.mark.parametrize(("of_others", "turns"), [(0.0, 1), (0.05, 1), (9.0, 2)])
def test_what_was_measured_while_others_computed_is_not_kept(
    of_others: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, measured_as = iter([1.0, 1.0 + of_others] * 2), iter([10, 20])
    monkeypatch.setattr(measured, "seconds_of_others", lambda: next(seconds))
    assert [once("spin", 2, int, lambda: next(measured_as)) for _ in range(2)] == [10, 20 if turns == 2 else 10]


def test_what_makes_no_sense_any_more_is_measured_again() -> None:
    keep("spin", 2, 5)
    assert once("spin", 2, int, lambda: 3000, lambda spin: spin > 5) == 3000


def test_others_are_told_from_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = tmp_path / "stat"
    times.write_text(
        "cpu 900 0 0 0 0 0 0 0 0 0\ncpu0 100 20 30 999 999 4 5 6 0 0\ncpu1 800 0 0 0 0 0 0 0 0 0\nintr 5\n"
    )
    monkeypatch.setattr(measured, "PROCESSOR_TIMES", times)
    monkeypatch.setattr(measured.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(measured.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(measured.os, "times", lambda: (0.3, 0.2, 0.1, 0.05, 99.0))
    assert seconds_of_others() == pytest.approx(1.59 - 0.65)
    times.write_text("cpu0 what\n")
    assert seconds_of_others() == 0
    times.unlink()
    assert seconds_of_others() == 0

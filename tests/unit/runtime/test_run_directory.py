"""The private directory: its mode, its removal, and what a new start may delete."""

import os
from pathlib import Path

import pytest

from overlap_spec.errors import OverlapSpecError
from overlap_spec.runtime.run_directory import LOCK_FILE, RunDirectory, remove_stale


def leftover(where: Path, name: str) -> Path:
    path = where / name
    path.mkdir(mode=0o700)
    (path / LOCK_FILE).touch()
    (path / "worker.sock").touch()
    return path


def test_private_and_named_for_its_owner(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    assert run_dir.path.name.startswith(f"overlap-spec-{os.getpid()}-")
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    run_dir.remove()
    run_dir.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_what_nobody_holds_is_removed(tmp_path: Path) -> None:
    left = leftover(tmp_path, "overlap-spec-12345-abcd1234")
    foreign = tmp_path / "overlap-spec-notes-1"
    foreign.mkdir()
    link = tmp_path / "overlap-spec-1-link"
    link.symlink_to(leftover(tmp_path, "elsewhere"))
    living = RunDirectory(tmp_path)
    assert (left.exists(), living.path.exists(), foreign.exists(), link.exists()) == (False, True, True, True)
    remove_stale(tmp_path)
    assert living.path.exists()
    assert (tmp_path / "elsewhere" / LOCK_FILE).exists()
    living.remove()


def test_the_lock_counts_and_not_the_number_in_the_name(tmp_path: Path) -> None:
    """In another container the owner's number means nothing."""
    run_dir = RunDirectory(tmp_path)
    renamed = run_dir.path.rename(tmp_path / "overlap-spec-999999999-abcd1234")
    remove_stale(tmp_path)
    assert renamed.exists()
    run_dir.remove()  # closes the lock; the renamed directory stays
    remove_stale(tmp_path)
    assert not renamed.exists()


def test_a_path_too_long_for_a_socket_is_said_at_once(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with pytest.raises(OverlapSpecError, match="TMPDIR"):
        RunDirectory(deep)
    assert list(deep.iterdir()) == []

"""Files with prompts and tokens are closed to other users, whatever the umask, and whatever was there before."""

import os
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlap_spec.client.link import pack_ids
from overlap_spec.config.keys import make_private_folder, open_private, readable_by_others, write_private
from overlap_spec.entrypoints.cli.chat import _history
from overlap_spec.features.audit.transcripts import FaultFile, Transcript
from overlap_spec.messages import Admit, SamplingParams
from overlap_spec.runtime.tracing import Trace


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_missing_folders_are_closed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(0o755)
    path = tmp_path / "there" / "a" / "b" / "c.bin"
    write_private(path, b"one")
    with open_private(path, "ab") as file:
        file.write(b"two")
    assert path.read_bytes() == b"onetwo"
    assert [mode_of(each) for each in (path, path.parent, path.parents[1], path.parents[2])] == [
        *(0o600, 0o700, 0o700, 0o755),
    ]
    make_private_folder(path.parent)  # again: nothing happens


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_file_that_was_open_to_others_is_closed(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    path.chmod(0o644)
    open_private(path, mode).close()
    assert mode_of(path) == 0o600 and path.read_bytes() == (b"" if mode == "wb" else b"old")


def test_a_device_keeps_its_mode() -> None:
    before = mode_of(Path("/dev/null"))
    open_private(Path("/dev/null")).close()
    assert mode_of(Path("/dev/null")) == before


def test_who_can_read_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").touch(0o644)
    assert readable_by_others(tmp_path / "keys") == 0o644
    (tmp_path / "keys").chmod(0o660)
    assert readable_by_others(tmp_path / "keys") is None and readable_by_others(tmp_path / "none") is None


def test_the_fault_file_is_closed(tmp_path: Path) -> None:
    transcript = Transcript("a", Admit(1, pack_ids([1, 2]), SamplingParams(), (), arrived_at=0.0))
    transcript.output = array("i", [3])
    file = FaultFile(str(tmp_path / "audit" / "faults.jsonl"))
    file.write(transcript, [])
    assert b'"prompt_ids":[1,2]' in file.path.read_bytes()
    assert (mode_of(file.path), mode_of(file.path.parent)) == (0o600, 0o700)


def test_traces_and_the_history_of_chats_are_closed(tmp_path: Path) -> None:
    Trace("worker", tmp_path / "traces").write()
    assert mode_of(tmp_path / "traces" / "worker.trace") == 0o600
    with _history(tmp_path / "cache" / "history"):
        pass
    assert (mode_of(tmp_path / "cache" / "history"), mode_of(tmp_path / "cache")) == (0o600, 0o700)

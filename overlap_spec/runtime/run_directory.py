"""The private directory of one run (0700) and the addresses of its sockets: named for its owner, gone with it.

An owner that was killed cannot clean up, so the next start removes its directory. A directory has an owner as long as
its lock is held: the kernel releases the lock when the owner ends. Process numbers would mislead where containers share
a temporary directory.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from overlap_spec.errors import OverlapSpecError

PREFIX = "overlap-spec"
LOCK_FILE = "lock"
ADDRESS_FILE = "address"  # the URL of the run's HTTP server, if it has one
LONGEST_SOCKET_PATH = 107  # bytes; sockaddr_un on Linux, its closing zero not counted


class Endpoints:
    """One inbox per actor, step links, and the client link. The directory's mode is 0700.

    Processes that are started again get addresses of their own `generation`: no message of one that is gone reaches
    them. Supervisor and clients keep theirs.
    """

    def __init__(self, run_dir: Path, generation: int = 0) -> None:
        self.run_dir = run_dir
        self._suffix = f".{generation}" if generation else ""

    def inbox(self, actor: str) -> str:
        """Where an actor reads."""
        return f"ipc://{self.run_dir / actor}{self._suffix}.sock"

    def supervisor(self) -> str:
        """Where the supervisor reads."""
        return f"ipc://{self.run_dir / 'supervisor.sock'}"

    def steps(self, actor: str) -> Path:
        """Where an actor reads plans or results (`step_link.py`)."""
        return self.run_dir / f"{actor}{self._suffix}.steps"

    def agreement(self) -> Path:
        """A directory in which the ranks of the worker tell each other what they have found (`ranks.py`)."""
        return self.run_dir / f"ranks{self._suffix}"

    def reductions(self) -> Path:
        """A file through which the ranks of the worker find each other."""
        return self.run_dir / f"reductions{self._suffix}"

    def client(self) -> str:
        """The client link, where no public address is set."""
        return f"ipc://{self.run_dir / 'client.sock'}"


class RunDirectory:
    """Made on construction, removed by `remove`. Raises: OverlapSpecError if its path is too long for a socket."""

    def __init__(self, parent: Path | None = None) -> None:
        where = parent or Path(tempfile.gettempdir())
        remove_stale(where)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{os.getpid()}-", dir=where))
        # Locked under another name first: a lock file that can be seen is held, or its owner is gone.
        self._lock = _locked(self.path / f"{LOCK_FILE}.new")
        (self.path / f"{LOCK_FILE}.new").rename(self.path / LOCK_FILE)
        if len(os.fsencode(self.path / "scheduler.999.steps")) > LONGEST_SOCKET_PATH:
            self.remove()
            raise OverlapSpecError(f"the temporary directory {where} has too long a path for a socket: set TMPDIR")

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(self.path)

    def announce(self, url: str) -> None:
        """Leave the address of the run's HTTP server where `announced` finds it."""
        (self.path / ADDRESS_FILE).write_text(url)

    def remove(self) -> None:
        """Delete the directory and all in it; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def announced(where: Path | None = None) -> list[str]:
    """The addresses of the HTTP servers that this user runs on this machine, in their order."""
    found = []
    for path in (where or Path(tempfile.gettempdir())).glob(f"{PREFIX}-*-*"):
        with contextlib.suppress(OSError):  # of another user, without a server, or just removed
            if path.lstat().st_uid == os.getuid() and not path.is_symlink() and _is_locked(path / LOCK_FILE):
                found.append((path / ADDRESS_FILE).read_text())
    return sorted(found)


def remove_stale(where: Path) -> None:
    """Delete the directories in `where` whose owners were killed, and no other."""
    for path in where.glob(f"{PREFIX}-*-*"):
        with contextlib.suppress(OSError):  # locked, no lock file, or another start was quicker
            if path.lstat().st_uid == os.getuid() and (path / LOCK_FILE).is_file() and not path.is_symlink():
                with _locked(path / LOCK_FILE):
                    shutil.rmtree(path, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    """Whether the owner lives."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _locked(path: Path) -> IO[bytes]:
    """Open and lock a file. Raises: BlockingIOError if another process holds the lock."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file

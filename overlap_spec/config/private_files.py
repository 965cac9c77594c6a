"""Files that only this user reads: those that hold prompts, texts or tokens of requests, or name them."""

import os
import stat
from pathlib import Path
from typing import IO

FILE_MODE, FOLDER_MODE = 0o600, 0o700


def open_private(path: Path, mode: str = "wb") -> IO[bytes]:
    """Open a file to write it, which others cannot read: nor one that was there before. `mode`: "wb" or "ab".

    Folders that are missing are made, and are private too; those that are there stay as they are. Raises: OSError.
    """
    make_private_folder(path.parent)
    file = open(path, mode, opener=lambda name, flags: os.open(name, flags, FILE_MODE))  # noqa: SIM115 - who asked closes it
    try:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), FILE_MODE)
    except BaseException:
        file.close()
        raise
    return file


def write_private(path: Path, content: bytes) -> None:
    """Write a whole file, as `open_private` does. Raises: OSError."""
    with open_private(path) as file:
        file.write(content)


def make_private_folder(path: Path) -> None:
    """Make a folder and what is missing above it, all of them closed to others. Raises: OSError."""
    missing = [path, *path.parents]
    for folder in reversed(missing):
        if not folder.exists():
            folder.mkdir(FOLDER_MODE, exist_ok=True)


def readable_by_others(path: Path) -> int | None:
    """The mode of a file that every user of the machine can read; None of another one, or without it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None
    return mode if mode & stat.S_IROTH else None

"""The API keys, of a flag, of the environment, and of a file; and files that only this user reads.

# /etc/overlap-spec/keys
alice:sk-1f0c..
alice:sk-77ab..         two keys of one client
sk-9d3e..               a client without a name
bob:sk-0c41.. adapt     a client whose requests a draft may learn from (--adapt-draft)

Linux shows the memory in which the kernel put the command line and the environment (`ps`, `/proc/PID/cmdline`,
`/proc/PID/environ`). Keys are overwritten there (`hide_keys`); Python reads its arguments and environment before, once.
Until then, for as long as an interpreter takes to start, the list of processes has shown them.

Files that hold prompts, texts or tokens of requests, or name them, are private, too.
"""

import contextlib
import ctypes
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from overlap_spec.config.environment import ADMIN_API_KEY, API_KEY, asked_key
from overlap_spec.config.flags import EngineConfig
from overlap_spec.config.settings import OPERATOR, ApiKeys
from overlap_spec.errors import ConfigError

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


def can_be_written(path: Path) -> bool:
    """Whether `open_private` could make the file, or write to it, now."""
    path = path.absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    return there.is_dir() is not (there == path) and os.access(there, os.W_OK)


def readable_by_others(path: Path) -> int | None:
    """The mode of a file that every user of the machine can read; None of another one, or without it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None
    return mode if mode & stat.S_IROTH else None


RESERVED = re.compile(r"line \d+|default")  # names that keys without one have
MARK = re.compile(r"\s+adapt$")  # behind a key
MOST_NAME = 128  # characters of a key's name, which goes before request ids
OWN = Path("/proc/self")
FLAGS = re.compile(rb"\0--(?:admin-)?api-key[=\0]([^\0]+)")
VARIABLES = re.compile(rb"(?:^|\0)OVERLAP_SPEC_(?:ADMIN_)?API_KEY=([^\0]+)")
ARGUMENTS_AT, ENVIRONMENT_AT = 45, 47  # the words of `stat` after the name: where each begins, and where it ends

log = logging.getLogger(__name__)


def read_keys(config: EngineConfig) -> ApiKeys:
    """Every key that the flags, the environment and the file give. Raises: ConfigError, which shows no key."""
    names: dict[str, str] = {}
    sharing: set[str] = set()
    single = _sendable("api_key", config.api_key or asked_key(API_KEY))
    if single is not None:
        names[single] = "default"
    if config.api_key_file is not None:
        names |= _of_file(Path(config.api_key_file).expanduser(), names, sharing)
    admin = _sendable("admin_api_key", config.admin_api_key or asked_key(ADMIN_API_KEY))
    if admin is not None and admin in names:
        raise ConfigError("admin_api_key", "is also one of the API keys: give the operator a key of its own")
    if long := next((name for name in names.values() if len(name) > MOST_NAME), None):
        text = f"a name of a key has at most {MOST_NAME} characters, {long[:16]!r}.. has {len(long)}"
        raise ConfigError("api_key_file", text)
    if OPERATOR in names.values():
        raise ConfigError("api_key_file", f"the name {OPERATOR!r} is the operator's, whose key is --admin-api-key")
    return ApiKeys(names, admin, tuple(sorted(sharing)))


def _sendable(field: str, key: str | None) -> str | None:
    """A key without blanks and ends of lines around it, which no header can have. Raises: ConfigError."""
    found = None if key is None else key.strip()
    if found is not None and not (found and found.isprintable()):
        raise ConfigError(field, "is blank or has control characters: no client can send that")
    return found


def _of_file(path: Path, others: dict[str, str], sharing: set[str]) -> dict[str, str]:
    """Names by key. Adds to `sharing` those that are marked."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError("api_key_file", f"{path} cannot be read: {reason}") from None
    if (mode := readable_by_others(path)) is not None:
        log.warning("--api-key-file: every user of this machine can read %s, its mode is %04o: chmod o-r", path, mode)
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        entry = line.strip()
        marked = MARK.search(entry) is not None
        entry = MARK.sub("", entry)
        if not entry or entry.startswith("#"):
            continue
        name, colon, key = entry.partition(":")
        name, key = (name.strip(), key.strip()) if colon else (f"line {number}", entry)
        if colon and (RESERVED.fullmatch(name) or not name.isprintable()):
            why = "is that of a key without one" if name.isprintable() else "has control characters"
            raise ConfigError("api_key_file", f"{path}: line {number}: the name {name[:32]!r} {why}: give another")
        if not (name and key) or key in found or key in others:
            wrong = "has a key that was given before" if name and key else "must be KEY or NAME:KEY"
            raise ConfigError("api_key_file", f"{path}: line {number} {wrong}")
        if name in found.values() and (name in sharing) != marked:
            text = f"{path}: line {number}: {name} is marked as adapt in one line and not in another: mark all or none"
            raise ConfigError("api_key_file", text)
        found[key] = name
        if marked:
            sharing.add(name)
    if not found:
        raise ConfigError("api_key_file", f"{path} has no key")
    return found


def hide_keys() -> None:
    """Overwrite every key of the command line and of the environment. Elsewhere than on Linux: do nothing."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _overwrite(FLAGS, "cmdline", ARGUMENTS_AT)
        _overwrite(VARIABLES, "environ", ENVIRONMENT_AT)


def _overwrite(keys: re.Pattern[bytes], name: str, words_at: int) -> None:
    spans = list(_spans(keys, (OWN / name).read_bytes()))
    if not spans:
        return
    words = (OWN / "stat").read_text().rpartition(")")[2].split()
    begin, end = (int(word) for word in words[words_at : words_at + 2])
    for start, stop in spans:
        if begin and begin + stop <= end:
            ctypes.memset(begin + start, ord("*"), stop - start)


def _spans(keys: re.Pattern[bytes], text: bytes) -> Iterator[tuple[int, int]]:
    return (match.span(1) for match in keys.finditer(text))

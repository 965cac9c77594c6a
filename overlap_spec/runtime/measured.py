"""Figures that were measured on this machine, kept for the next start.

A figure that was measured while other processes used the cores serves this start and is not kept.

Each figure has a small file in the cache directory, named after all that it depends on: the processor, how many cores
this process may use, torch's version, and what the caller adds. A file that cannot be read, that another user may have
written, or that has unexpected content, is ignored, and the log names it; where none can be written, the next start
measures again.
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from overlap_spec.config import cache_directory
from overlap_spec.config.environment import BY_OTHERS
from overlap_spec.config.keys import write_private
from overlap_spec.runtime.machine import num_cores, processor_name

T = TypeVar("T")

PROCESSOR_TIMES = Path("/proc/stat")
MOST_OF_OTHERS = 0.2  # of one core
CLOCK_S = 0.1  # the error of the kernel's clock, at most

log = logging.getLogger(__name__)


class Kept(msgspec.Struct, frozen=True):
    """The content of a file. `of`: the digest of what the figure depends on, so that no other figure passes for it."""

    of: str
    figure: msgspec.Raw


def once(
    what: str,
    of: object,
    kind: type[T],
    measure: Callable[[], T],
    makes_sense: Callable[[T], bool] = lambda _: True,
    on_cpu: bool = True,
) -> T:
    """The figure kept as `what` for `of`, or measured now; kept if the machine was quiet meanwhile.

    `on_cpu`: False for a figure that other processes on the cores do not change.
    """
    found = recall(what, of, kind)
    if found is not None and makes_sense(found):
        return found
    before, started = seconds_of_others(), time.monotonic()
    found = measure()
    if not on_cpu or seconds_of_others() - before <= MOST_OF_OTHERS * (time.monotonic() - started) + CLOCK_S:
        keep(what, of, found)
    return found


def seconds_of_others() -> float:
    """Seconds that other processes, children of this one apart, have used its cores so far; 0 if that is unknown."""
    own = sum(os.times()[:4])
    try:
        lines = [line.split() for line in PROCESSOR_TIMES.read_text().splitlines() if line.startswith("cpu")]
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        # user, nice, system, idle, waiting for disks, interrupts, soft ones; what other machines take never ends
        ticks = sum(sum(map(int, words[1:4] + words[6:8])) for words in lines if words[0] in ours)
        return ticks / os.sysconf("SC_CLK_TCK") - own
    except (OSError, ValueError, AttributeError):
        return 0.0


def recall(what: str, of: object, kind: type[T]) -> T | None:
    """The figure kept as `what` for `of` on such a machine; None without one, or if its file is ignored."""
    digest = _digest(of)
    path = _file(what, digest)
    try:
        kept = msgspec.json.decode(_read(path), type=Kept)
        if kept.of == digest:
            return msgspec.json.decode(kept.figure, type=kind)
        problem: object = "it is of other settings"
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        problem = error
    log.warning("%s is ignored, and measured anew: %s", path, problem)
    return None


def keep(what: str, of: object, value: object) -> None:
    """Keep a figure for `recall`. The file is replaced at once: a reader sees the old one or the new one."""
    digest = _digest(of)
    path, content = _file(what, digest), msgspec.json.encode(Kept(digest, msgspec.Raw(msgspec.json.encode(value))))
    with contextlib.suppress(OSError):
        scratch = path.with_suffix(f".{os.getpid()}")
        write_private(scratch, content)
        os.replace(scratch, path)


def _read(path: Path) -> bytes:
    """A file that only this user or root can have written. Raises: OSError for another one."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & BY_OTHERS:
            raise PermissionError("another user may have written it")
        return file.read()


def torch_version() -> str:
    """The version of the torch that an import would load."""
    return importlib.metadata.version("torch")


def _digest(of: object) -> str:
    key = (processor_name(), num_cores(), torch_version(), of)
    return hashlib.sha256(msgspec.json.encode(key)).hexdigest()


def _file(what: str, digest: str) -> Path:
    return Path(cache_directory()) / "measured" / f"{what}-{digest[:16]}"

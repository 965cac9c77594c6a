"""What was measured on this machine, kept for the next start. Not here: measuring.

A small file in the cache directory for each thing measured, named after all that it depends on: the processor, how many
cores this process may use, torch's version, and what the caller adds. A file that cannot be read, or says something
else than expected, is as good as none; where none can be written, the next start measures again.
"""

import contextlib
import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from overlap_spec.config import cache_directory
from overlap_spec.machine import num_cores, processor_name

T = TypeVar("T")


def recall(what: str, of: object, kind: type[T]) -> T | None:
    """What was kept as `what` for `of` on such a machine; None if nothing was, or nothing that makes sense."""
    try:
        return msgspec.json.decode(_file(what, of).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def keep(what: str, of: object, value: object) -> None:
    """Keep it for `recall`. A reader meanwhile sees the whole of it, or nothing."""
    path = _file(what, of)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(value))
        os.replace(scratch, path)


def torch_version() -> str:
    """Of the torch that would be imported."""
    return importlib.metadata.version("torch")


def _file(what: str, of: object) -> Path:
    key = (processor_name(), num_cores(), torch_version(), of)
    return Path(cache_directory()) / "measured" / f"{what}-{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]}"

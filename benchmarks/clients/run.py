"""Runs real clients against a server, each in an environment of its own, and writes what came of it.

    python benchmarks/clients/run.py --work DIR [--url URL] [--only openai anthropic ..]

Without --url it starts `overlap-spec serve` with the default model. DIR keeps environments and downloads between runs.
The clients' versions are pinned in `requirements/`. Results: one JSON file a client in `benchmarks/results/clients/`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from clients_table import BENCHMARKS, CHECKS, MODEL, OPENAI_SDIST, SGLANG_WHEEL, Place  # noqa: E402
from results_of import pytest_summary, requests_of  # noqa: E402

from overlap_spec.bench.source import describe_source  # noqa: E402

RESULTS = ROOT / "benchmarks/results/clients"
TOKENIZER = ROOT / "overlap_spec/data/smollm2"
PORT = 30123
OTHER_MODELS = re.compile(r"gpt-3\.5-turbo-instruct|gpt-6-astra")
START_S, CLIENT_S = 300, 900


def main() -> None:
    """Run the clients that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--url")
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    place = Place(given.work.resolve(), given.url or f"http://127.0.0.1:{PORT}", TOKENIZER)
    place.work.mkdir(parents=True, exist_ok=True)
    runs = {name: lambda name=name: checked(place, name) for name in CHECKS}
    runs |= {name: lambda name=name: benchmarked(place, name) for name in BENCHMARKS}
    runs |= {"openai_sdist": lambda: openai_tests(place), "sglang_kits": lambda: sglang_kits(place)}
    with server(given.url):
        for name in given.only or runs:
            write(name, runs[name]())


@contextmanager
def server(url: str | None) -> Iterator[None]:
    """A server of the default model, unless there is one."""
    if url is not None:
        yield
        return
    flags = ["--port", str(PORT), "--served-model-name", MODEL, "--max-total-tokens", "20000"]
    command = [sys.executable, "-m", "overlap_spec", "serve", *flags, "--tool-call-parser", "hermes"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        _until_healthy(process)
        yield
    finally:
        process.terminate()
        process.wait()


def environment(place: Place, name: str) -> Path:
    """The Python of a client's own environment, made once."""
    directory = place.work / name
    python = directory / "bin/python"
    if not (directory / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        pinned = HERE / f"requirements/{name}.txt"
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", pinned], check=True)
        (directory / "made").touch()
    return python


def checked(place: Place, name: str) -> dict[str, object]:
    """Run the script of an SDK; its last line is its result."""
    python = environment(place, CHECKS[name].environment)
    command = [python, HERE / "cases" / CHECKS[name].script, place.url, MODEL]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=CLIENT_S)
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def benchmarked(place: Place, name: str) -> dict[str, object]:
    """Run a benchmark's command; its output says how many requests succeeded."""
    case = BENCHMARKS[name]
    python = environment(place, case.environment)
    out = place.work / "out" / f"{name}-{time.strftime('%H%M%S')}"
    out.mkdir(parents=True)
    command = [str(python.parent / case.program), *(part.format(**place.values(out)) for part in case.arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_S, cwd=out)
    (out / "log").write_text(done.stdout + done.stderr)
    versions = _versions(python, case.packages)
    return {"versions": versions, "status": done.returncode, **requests_of(name, out)}


def openai_tests(place: Place) -> dict[str, object]:
    """The tests of the openai package's own source for chats, completions and models; they ask for the model served."""
    python = environment(place, "sdk")
    fetched = _download(place, python, "--no-binary", "openai", OPENAI_SDIST)
    with tarfile.open(fetched) as archive:
        archive.extractall(place.work, filter="data")
    folder = place.work / fetched.name.removesuffix(".tar.gz")
    tests = [f"tests/api_resources/{part}" for part in ("test_completions.py", "chat", "test_models.py")]
    for path in (folder / "tests/api_resources").rglob("*.py"):
        path.write_text(OTHER_MODELS.sub(MODEL, path.read_text()))
    return _pytest(python, tests, folder, {"TEST_API_BASE_URL": f"{place.url}/v1"})


def sglang_kits(place: Place) -> dict[str, object]:
    """SGLang's server test kits that need nothing of sglang."""
    python = environment(place, "sdk")
    kits = place.work / "kits"
    with zipfile.ZipFile(_download(place, python, SGLANG_WHEEL)) as wheel:
        names = [name for name in wheel.namelist() if name.startswith("sglang/test/kits/")]
        wheel.extractall(kits, names)
    own = {"BASE_URL": place.url, "MODEL": MODEL, "TOKENIZER": str(place.tokenizer)}
    plain = ["-c", os.devnull, "-p", "no:asyncio", str(HERE / "cases/test_kits.py")]
    return _pytest(python, plain, HERE, {**own, "KITS": str(kits / "sglang/test/kits")})


def write(name: str, result: dict[str, object]) -> None:
    """Write one client's summary."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    summary = {
        "client": name,
        "model": "SmolLM2-135M-Instruct",
        **result,
        **describe_source().describe(),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(name, {key: value for key, value in result.items() if key != "versions"}, flush=True)


def _pytest(python: Path, arguments: list[str], folder: Path, own: dict[str, str]) -> dict[str, object]:
    command = [str(python), "-m", "pytest", "-q", "-rA", "--timeout", "120", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | own, stdout=subprocess.PIPE, text=True, timeout=CLIENT_S
    )
    return {"versions": _versions(python, ("openai", "pytest")), **pytest_summary(done.stdout)}


def _download(place: Place, python: Path, *what: str) -> Path:
    folder = place.work / "downloads" / what[-1].split("==")[0]
    if not folder.exists():
        subprocess.run([python, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *what], check=True)
    (found,) = folder.iterdir()
    return found


def _versions(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    code = "import json, sys; from importlib.metadata import version as v; "
    code += "print(json.dumps({name: v(name) for name in sys.argv[1:]}))"
    done = subprocess.run([str(python), "-c", code, *packages], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _until_healthy(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health"):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit("the server has not become ready")


if __name__ == "__main__":
    main()

"""Runs real clients against a server, each in an environment of its own, and writes what came of it.

    python benchmarks/clients/run.py --work DIR [--url URL] [--only openai anthropic ..]

Without --url it starts `overlap-spec serve` with the default model. DIR keeps environments and downloads between runs.
The clients' versions are pinned in `requirements/`. Results: one JSON file a client in `benchmarks/results/clients/`.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder

from clients_table import BENCHMARKS, CHECKS, MODEL, SERVER_FLAGS, WHAT, Place
from environments import environment, python_files, versions
from results_of import requests_of
from suites import openai_tests, sglang_kits

from overlap_spec.config import cache_directory
from overlap_spec.hub import smollm2
from overlap_spec.runtime.source import describe_source

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks/results/clients"
START_S, CLIENT_S = 300, 900


def main() -> None:
    """Run the clients that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--url")
    parser.add_argument("--port", type=int, default=30123, help="of the server that is started")
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    weights = Path(cache_directory()) / smollm2.ALIAS / Path(smollm2.MEMBER).name
    place = Place(given.work.resolve(), given.url or f"http://127.0.0.1:{given.port}", smollm2.DATA, weights)
    place.work.mkdir(parents=True, exist_ok=True)
    runs = all_runs()
    for flags, names in groupby(given.only or runs, lambda name: SERVER_FLAGS.get(name, ())):
        with nullcontext() if given.url else server(given.port, flags):
            for name in names:
                write(name, runs[name](place))


def all_runs() -> dict[str, Callable[[Place], dict[str, object]]]:
    """What runs each client."""
    runs: dict[str, Callable[[Place], dict[str, object]]] = {}
    runs |= {name: lambda place, name=name: checked(place, name) for name in CHECKS}
    runs |= {name: lambda place, name=name: benchmarked(place, name) for name in BENCHMARKS}
    return runs | {"openai_sdist": openai_tests, "sglang_kits": sglang_kits}


@contextmanager
def server(port: int, flags: Sequence[str]) -> Iterator[None]:
    """A server of the default model.

    Raises: SystemExit if another listens on its port, which the clients would be run against.
    """
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise SystemExit(f"port {port} is in use; name another with --port")
    own = ["--port", str(port), "--served-model-name", MODEL, "--max-total-tokens", "20000"]
    command = [sys.executable, "-m", "overlap_spec", "serve", *own, "--tool-call-parser", "hermes", *flags]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        _until_healthy(process, port)
        yield
    finally:
        process.terminate()
        process.wait()


def checked(place: Place, name: str) -> dict[str, object]:
    """Run the script of an SDK; its last line is its result."""
    python = environment(place.work, CHECKS[name].environment)
    script = HERE / "cases" / CHECKS[name].script
    command = [python, script, place.url, MODEL, place.tokenizer, place.weights]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=CLIENT_S)
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def benchmarked(place: Place, name: str) -> dict[str, object]:
    """Run a benchmark's command; its output says how many requests succeeded."""
    case = BENCHMARKS[name]
    python = environment(place.work, case.environment)
    out = place.work / "out" / f"{name}-{time.strftime('%H%M%S')}"
    out.mkdir(parents=True)
    command, used = [str(python.parent / case.program)], versions(python, case.packages)
    if case.wheel:
        files = python_files(place.work, case.wheel)
        command = [str(python), str(HERE / "cases/engine_bench.py"), str(files), case.program]
        used = {case.program: case.wheel.split("==")[1], **used}
    command += [part.format(**place.values(out)) for part in case.arguments]
    environ = os.environ | case.environ
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_S, cwd=out, env=environ)
    (out / "log").write_text(done.stdout + done.stderr)
    return {"versions": used, "status": done.returncode, **requests_of(name, out)}


def write(name: str, result: dict[str, object]) -> None:
    """Write one client's summary."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    summary = {
        "client": name,
        "what": WHAT[name],
        "model": "SmolLM2-135M-Instruct",
        "server_flags": SERVER_FLAGS.get(name, ()),
        **result,
        **describe_source().describe(),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(name, {key: value for key, value in result.items() if key != "versions"}, flush=True)


def _until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit("the server has not become ready")


if __name__ == "__main__":
    main()

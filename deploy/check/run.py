"""Checks all of `deploy/` with the tools that it is for, in environments of its own.

    apt-get install --no-install-recommends prometheus
    python deploy/check/run.py --work DIR [--only STEP ..] [--output benchmarks/results/deploy_cpu.json]

alerts      promtool: syntax, the unit tests of every alert, and that they notice each alert that is taken away
dockerfile  hadolint; and the files that it copies are enough to install the package, with the extra `otlp`
compose     `docker compose config`, without and with the GPU
kubernetes  Kubernetes' schemas, strictly
live        an engine of the installed package, scraped by a real Prometheus: every panel has data, an alert fires
otlp        the tests of spans of requests, which are skipped elsewhere

Three minutes on two cores, and some more once to install PyTorch. DIR is kept between runs.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEPLOY, PROMETHEUS = ROOT / "deploy", ROOT / "deploy/prometheus"
COMPOSE = ("-f", DEPLOY / "compose.yaml"), ("-f", DEPLOY / "compose.yaml", "-f", DEPLOY / "compose.cuda.yaml")
OLDEST_KUBERNETES = "1.30.0"
OTLP_TESTS = (
    "tests/unit/entrypoints/test_server_otlp.py",
    "tests/unit/config/test_otlp_target.py",
    "tests/integration/test_ring_phases.py",
    "tests/e2e/test_e2e_otlp.py",
)

Json = dict[str, Any]


def main() -> int:
    """Run the steps. Returns 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="for the environments")
    parser.add_argument("--only", nargs="*", choices=STEPS, default=list(STEPS))
    parser.add_argument("--output", type=Path, help="JSON file for what came of it")
    given = parser.parse_args()
    work = given.work.resolve()
    results: Json = {}
    for name in given.only:
        begun = time.monotonic()
        try:
            results[name] = {"passed": True, **STEPS[name](work)}
        except (Failed, subprocess.CalledProcessError) as error:
            results[name] = {"passed": False, "error": output_of(error)}
        results[name]["seconds"] = round(time.monotonic() - begun, 1)
        print(name, json.dumps(results[name]), flush=True)
    if given.output:
        write(given.output, work, results)
    return 0 if all(result["passed"] for result in results.values()) else 1


class Failed(Exception):
    """A step has found something."""


def output_of(error: Exception) -> str:
    """What a person needs to see of it."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"{error}: {error.output}\n{error.stderr or ''}"[-3000:]
    return str(error)


def write(output: Path, work: Path, results: Json) -> None:
    """Write the summary, with the machine and the commit."""
    code = "import json; from overlap_spec.bench.report import describe_run; "
    code += "print(json.dumps(describe_run('cpu', 1, ['deploy'])))"
    described = run(engine_python(work), "-c", code)
    report = json.loads(described) | {"command": "python deploy/check/run.py"} | results
    output.write_text(json.dumps(report, indent=1) + "\n")


def run(*command: str | Path, **options: Any) -> str:
    """Run a command in the tree. Returns its output. Raises: CalledProcessError."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=variables(), timeout=600, **options
    )
    return done.stdout + done.stderr


def variables() -> dict[str, str]:
    """What runs imports the tree, and not what is installed."""
    tree = os.pathsep.join(str(place) for place in (ROOT, ROOT / "kernels", ROOT / "tests"))
    return {**os.environ, "PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}


def environment(work: Path, name: str, *requirements: str | Path) -> Path:
    """The programs of an environment, made once."""
    folder = work / name
    if not (folder / "made").exists():
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(folder / "bin/python", "-m", "pip", "install", "-q", *requirements)
        (folder / "made").touch()
    return folder / "bin"


def tools(work: Path) -> Path:
    """Programs that check files."""
    return environment(work, "tools", "-r", HERE / "requirements.txt")


def program(name: str) -> str:
    """A program of this machine."""
    found = shutil.which(name)
    if found is None:
        raise Failed(f"no {name} here: apt-get install --no-install-recommends prometheus")
    return found


# --- alerts ---


def alerts(work: Path) -> Json:
    """Prometheus' own checks, and whether the tests notice each alert that is taken away."""
    promtool = program("promtool")
    run(promtool, "check", "rules", PROMETHEUS / "alerts.yml")
    run(promtool, "check", "config", PROMETHEUS / "prometheus.yml")
    run(promtool, "test", "rules", PROMETHEUS / "alerts_test.yml")
    names = re.findall(r"- alert: (\w+)", (PROMETHEUS / "alerts.yml").read_text())
    unnoticed = [name for name in names if not notices(promtool, name)]
    if unnoticed:
        raise Failed(f"the tests pass without {unnoticed}")
    return {"alerts": len(names), "promtool": version_of(promtool)}


def notices(promtool: str, alert: str) -> bool:
    """Whether the unit tests fail if that alert never fires."""
    with tempfile.TemporaryDirectory() as folder:
        rules = (PROMETHEUS / "alerts.yml").read_text().replace(f"- alert: {alert}\n", f"- alert: No{alert}\n")
        Path(folder, "alerts.yml").write_text(rules)
        shutil.copy(PROMETHEUS / "alerts_test.yml", folder)
        done = subprocess.run([promtool, "test", "rules", "alerts_test.yml"], cwd=folder, capture_output=True)
        return done.returncode != 0


def version_of(prometheus: str) -> str:
    """`2.42.0`, say."""
    found = re.search(r"version (\d[\d.]*)", run(prometheus, "--version"))
    return found[1] if found else "unknown"


# --- files ---


def dockerfile(work: Path) -> Json:
    """The linter, and an installation of what is copied, by the image's own command."""
    run(tools(work) / "hadolint", DEPLOY / "Dockerfile")
    code = "import sys; from overlap_spec.entrypoints.cli import main; "
    code += "import overlap_spec.entrypoints.otlp, overlap_spec_kernels; "
    code += "print(overlap_spec.__file__); main(['--version'])"
    place, version = run(engine_python(work), "-I", "-c", code).splitlines()  # -I: without the tree
    if not Path(place).is_relative_to(work):
        raise Failed(f"{place} is not what was installed")
    return {"hadolint": run(tools(work) / "hadolint", "--version").split()[-1], "installed": version}


def engine_python(work: Path) -> Path:
    """The Python of the package, installed from the files that the Dockerfile copies."""
    tree = work / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for source, target in copied():
        copy = shutil.copytree if source.is_dir() else shutil.copy
        target = tree / target / ("" if source.is_dir() else source.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        copy(source, target)
    more = "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "accelerate", "transformers", "pyyaml"
    pinned = "-c", ROOT / "constraints.txt", f"{tree}[otlp]", *more, "promql-parser"
    return environment(work, "engine", *pinned) / "python"


def copied() -> Iterator[tuple[Path, str]]:
    """What the first stage copies, and where to."""
    text = (DEPLOY / "Dockerfile").read_text().partition("FROM")[2].partition("\nFROM")[0]
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *sources, target = line.split()
        yield from ((ROOT / source, target) for source in sources)


def compose(work: Path) -> Json:
    """Docker's own reading of the files."""
    for files in COMPOSE:
        run(tools(work) / "docker-compose", *files, "config", "--quiet")
    return {"docker compose": run(tools(work) / "docker-compose", "version", "--short").strip()}


def kubernetes(work: Path) -> Json:
    """Against two versions' schemas."""
    manifest, validate = DEPLOY / "kubernetes/overlap-spec.yaml", tools(work) / "kubernetes-validate"
    found = [run(validate, "--strict", *version, manifest) for version in ((), ("-k", OLDEST_KUBERNETES))]
    return {"resources": found[0].count(" passed for resource "), "oldest": OLDEST_KUBERNETES}


# --- what runs ---


def live(work: Path) -> Json:
    """See `live.py`."""
    text = run(engine_python(work), HERE / "live.py", program("prometheus"), work / "live")
    found: Json = json.loads(text.splitlines()[-1])
    return found | {"prometheus": version_of(program("prometheus"))}


def otlp(work: Path) -> Json:
    """Tests that need the extra."""
    command = "-m", "pytest", "-q", "-p", "no:cacheprovider", *OTLP_TESTS
    last = run(engine_python(work), *command).strip().splitlines()[-1]
    if "skipped" in last or "passed" not in last:
        raise Failed(last)
    return {"tests": int(last.split()[0])}


STEPS: dict[str, Callable[[Path], Json]] = {
    "alerts": alerts,
    "dockerfile": dockerfile,
    "compose": compose,
    "kubernetes": kubernetes,
    "live": live,
    "otlp": otlp,
}


if __name__ == "__main__":
    sys.exit(main())

"""Tests the Ray Serve application with a real Ray, in an environment of its own.

    python tests/ray_serve/run.py --work DIR [--only NAME ..] [--output benchmarks/results/ray_cpu.json]

It installs the project with its extra `ray` into DIR, starts a Ray cluster on this machine with a tiny random model,
and runs `cases.py`: about four minutes on two cores once installed, and 3 GiB of memory. DIR is kept between runs.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> int:
    """Install, then run the cases. Returns their exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="for the environment")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="cases to run")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    given = parser.parse_args()
    python = environment(given.work.resolve())
    arguments = [*given.only, *(("--output", str(given.output.resolve())) if given.output else ())]
    return subprocess.run([python, HERE / "cases.py", *arguments], env=variables(), cwd=ROOT).returncode


def environment(work: Path) -> Path:
    """The Python of the environment, made once."""
    python = work / "bin/python"
    if not (work / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", work], check=True)
        pinned = ["-c", ROOT / "constraints.txt", f"{ROOT}[ray]", "openai"]
        subprocess.run([python, "-m", "pip", "install", "-q", *pinned], check=True)
        (work / "made").touch()
    return python


def variables() -> dict[str, str]:
    """Ray's processes import the tree, not what is installed, and report their load often enough for a test."""
    tree = os.pathsep.join(str(place) for place in (ROOT, ROOT / "kernels", ROOT / "tests"))
    own = {
        "PYTHONPATH": tree,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    }
    return {**os.environ, **own}


if __name__ == "__main__":
    sys.exit(main())

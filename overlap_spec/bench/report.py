"""What every result file carries besides its figures: hardware, versions, commit and command.

Not here: measuring. A figure without these is not worth keeping.
"""

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from overlap_spec.machine import processor_name

VERSIONED = ("overlap-spec", "torch", "triton", "transformers", "pyzmq", "msgspec")
NOT_RECORDED = ("--output", "--commit")  # where a result goes, and what it says itself: no part of what was measured


def describe_run(device: str, num_threads: int, commit: str | None = None) -> dict[str, Any]:
    """Facts of this machine and of the command line that this process was started with.

    `device`: the worker's, as its start-up facts name it. `commit`: for a source tree without git metadata.
    """
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "cpu": processor_name(),
        "num_threads": num_threads,
        "python": platform.python_version(),
        "versions": {name: version for name in VERSIONED if (version := _version(name))},
        "commit": commit or _commit(),
        "command": recorded_command(sys.argv),
    }


def recorded_command(argv: Sequence[str]) -> str:
    """What measures the same again: a command line or a script, without `NOT_RECORDED`."""
    script = Path(argv[0]).resolve()
    is_script = script.suffix == ".py" and script.stem != "__main__"
    program = ["python", f"{script.parent.name}/{script.name}"] if is_script else ["overlap-spec"]
    words = zip(argv[1:], argv, strict=False)  # each with the one before it
    kept = [word for word, before in words if not {before, word.partition("=")[0]} & set(NOT_RECORDED)]
    return shlex.join(program + kept)


def write_report(path: str, report: dict[str, Any]) -> None:
    """Write a result file, readable in a diff."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(report, indent=1) + "\n")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit of the source tree; "+" after it means that the tree had changes; empty outside a git checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], cwd=here, capture_output=True, text=True
        )
    except OSError:
        return ""
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "") if head.returncode == 0 else ""

"""Measures one part: its commands one after another, each once, then one file of all their reports.

What was measured lies in `PART.partial/` until the last command is done, so a part that is cut off goes on where it
was, with the same code on the same device; else it is begun anew. The part's file appears whole, by a rename.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from overlap_spec.bench.report import as_text, describe_run, write_report
from overlap_spec.runtime.source import Source
from records.parts import Command, Hashes, Part
from records.reader import card_of, digest_of, file_of, partial_of

PROGRAMS = {"python": [sys.executable], "overlap-spec": [sys.executable, "-m", "overlap_spec"]}
GRACE_S = 10.0  # of a command that is ended
END_S = 5.0  # of the time that is given, to write files in
STATE = "state.json"
TAIL = 15  # lines of a command that failed


@dataclass(frozen=True)
class Machine:
    """`device`: the GPU as its driver names it; empty without one."""

    device: str
    driver: str

    @property
    def card(self) -> str:
        return card_of(self.device)


@dataclass(frozen=True)
class Site:
    """Where parts are measured. `results`: has a folder for each card; `record`: the digest of each part of it."""

    root: Path
    results: Path
    machine: Machine
    source: Source
    hashes: Hashes
    record: dict[str, str]
    ends_at: float  # on the monotonic clock

    @property
    def folder(self) -> Path:
        return self.results / self.machine.card

    def left_s(self) -> float:
        return self.ends_at - END_S - time.monotonic()


def find_machine() -> Machine:
    """Ask the driver: torch in this process would keep memory of the device."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return Machine("", "")
    first = done.stdout.partition("\n")[0] if done.returncode == 0 else ""
    device, _, driver = first.partition(", ")
    return Machine(device.strip(), driver.strip())


def remaining_s(site: Site, part: Part) -> int:
    """Expected seconds of the commands that are not done."""
    done = _state(site, part).get("done", {})
    return sum(command.seconds for command in part.commands if command.name not in done)


def measure(site: Site, part: Part) -> str:
    """Measure what is left of a part. Returns why it is not whole; empty if it is."""
    folder, state = partial_of(site.folder, part), _state(site, part)
    if not state:
        shutil.rmtree(folder, ignore_errors=True)
    elif state["source"] != site.source.describe():  # its code is the same, but a report does not go on
        _remove_reports(folder, [command for command in part.commands if command.name not in state["done"]])
    done: dict[str, float] = state.get("done", {})
    for index, command in enumerate(part.commands, 1):
        if command.name in done:
            continue
        if command.seconds > site.left_s():
            return f"no time for {command.name}: about {command.seconds} s, {max(site.left_s(), 0):.0f} s are left"
        head = f"{part.name} {index}/{len(part.commands)} {command.name}"
        print(f"{head}: about {command.seconds} s, {site.left_s():.0f} s are left", flush=True)
        _save(site, part, done)
        begun = time.monotonic()
        if problem := _run(site, command, folder):
            return f"{command.name} {problem}"
        done[command.name] = round(time.monotonic() - begun, 1)
        _save(site, part, done)
        print(f"{head}: took {done[command.name]:.0f} s", flush=True)
    _finish(site, part, folder, done)
    return ""


def _state(site: Site, part: Part) -> dict[str, Any]:
    """Of a part that was begun with this code on this device; empty if it was not."""
    path = partial_of(site.folder, part) / STATE
    state: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    is_same = (state.get("digest"), state.get("device")) == (digest_of(part, site.hashes), site.machine.device)
    return state if is_same else {}


def _save(site: Site, part: Part, done: dict[str, float]) -> None:
    state = {"part": part.name, "digest": digest_of(part, site.hashes), "device": site.machine.device}
    write_report(str(partial_of(site.folder, part) / STATE), state | {"source": site.source.describe(), "done": done})


def _remove_reports(folder: Path, commands: Sequence[Command]) -> None:
    for command in commands:
        (folder / f"{command.name}.json").unlink(missing_ok=True)


def _run(site: Site, command: Command, folder: Path) -> str:
    """Run a command while there is time. Returns what is wrong with it; empty if its report is whole."""
    output, log = folder / f"{command.name}.json", folder / f"{command.name}.log"
    if not command.resumes:
        _remove_reports(folder, [command])
    program, *words = shlex.split(command.words)
    line = [*PROGRAMS.get(program, [program]), *(word.replace("{output}", str(output)) for word in words)]
    with log.open("w") as stream:
        process = subprocess.Popen(line, cwd=site.root, stdout=stream, stderr=stream, start_new_session=True)
        try:
            status = process.wait(max(site.left_s(), 0.0))
        except subprocess.TimeoutExpired:
            return "was cut off: the time is over"
        finally:
            _end(process)
    if status != 0:
        lines = log.read_text(errors="replace").splitlines()[-TAIL:]
        return "\n  ".join((f"ended with status {status}", *lines))
    return "" if output.is_file() and command.whole(json.loads(output.read_text())) else "wrote a report with gaps"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End it, and what it has started: those are of its group."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _finish(site: Site, part: Part, folder: Path, done: dict[str, float]) -> None:
    """Write the part's file, and remove the folder."""
    run = describe_run(site.machine.device, os.cpu_count() or 1) | site.source.describe()
    own = {"when": datetime.now(UTC).isoformat(), "driver": site.machine.driver}
    reports: dict[str, Any] = {name: json.loads((folder / f"{name}.json").read_text()) for name in done}
    file = {
        "part": part.name,
        "card": site.machine.card,
        "digest": digest_of(part, site.hashes),
        "run": run | own,
        "commands": {each.name: {"command": each.words, "took_s": done[each.name]} for each in part.commands},
        "depends": {path: site.hashes[path] for path in part.depends},
        "record": site.record,
        "reports": reports,
    }
    path = file_of(site.folder, part, site.hashes)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(as_text(file))
    unfinished.replace(path)
    shutil.rmtree(folder)

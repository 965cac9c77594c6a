"""Tests the page at `/ui` in a real Chromium, against real servers, and takes its pictures.

    apt-get install -y chromium
    .venv/bin/python tests/browser/run.py --work DIR [--pictures] [CHECK ..]

It makes an environment of its own in DIR (`requirements.txt`; kept between runs) and starts three servers: the default
model, and a tiny one with an API key and one without the page. The summary goes to
`benchmarks/results/ui_browser.json`; `--pictures` writes `docs/images/`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.tiny.models import tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.tokenizer import write_tokenizer

from overlap_spec.runtime.source import describe_source

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULT = ROOT / "benchmarks/results/ui_browser.json"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PACKAGES = ("playwright", "axe-playwright-python", "pytest")
KEY = "a key"
START_S, CHECKS_S = 300, 900


def main() -> int:
    """Run the checks. Returns pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--pictures", action="store_true", help="take docs/images/ instead of checking")
    parser.add_argument("checks", nargs="*", help="for pytest: files, -k EXPRESSION; default: all, with a summary")
    given, more = parser.parse_known_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    python, report = environment(work), work / "report.xml"
    with ExitStack() as stack:
        servers = {"UI_CHROMIUM": chromium(), "UI_KEY": KEY}
        servers["UI_URL"] = stack.enter_context(server(work, "default", "--served-model-name", "smollm2"))
        if given.pictures:
            return subprocess.run([python, HERE / "pictures.py"], env=os.environ | servers).returncode
        tiny = tiny_flags(work)
        servers["UI_LOCKED_URL"] = stack.enter_context(server(work, "locked", *tiny, "--api-key", KEY))
        servers["UI_CLOSED_URL"] = stack.enter_context(server(work, "closed", *tiny, "--disable-ui"))
        begun = time.monotonic()
        command = [python, "-m", "pytest", "-c", HERE / "pytest.ini", f"--junit-xml={report}"]
        done = subprocess.run([*command, *(given.checks or [HERE]), *more], env=os.environ | servers, timeout=CHECKS_S)
    if not given.checks and not more:
        write(python, report, time.monotonic() - begun)
    return done.returncode


def environment(work: Path) -> Path:
    """The Python of the checks' own environment, made once."""
    python = work / "env/bin/python"
    if not (work / "env/made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", work / "env"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", HERE / "requirements.txt"], check=True)
        (work / "env/made").touch()
    return python


def chromium() -> str:
    """The system's browser."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SystemExit("no Chromium: apt-get install -y chromium")
    return found


def tiny_flags(work: Path) -> tuple[str, ...]:
    """A tiny random model with an EAGLE-3 head, on disk."""
    folder = work / "tiny"
    target = tiny_target(seed=1, max_position_embeddings=2048)
    write_checkpoint(folder, target)
    write_tokenizer(folder)
    write_checkpoint(folder / "head", tiny_eagle3(seed=2, target=target))
    model = ("--model", str(folder), "--dtype", "float32", "--max-total-tokens", "4000")
    return (*model, "--speculative-algorithm", "EAGLE3", "--speculative-draft-model", str(folder / "head"))


@contextmanager
def server(work: Path, name: str, *flags: str) -> Iterator[str]:
    """The address of a server that is ready."""
    command = [sys.executable, "-m", "overlap_spec", "serve", "--port", "0", "--log-level", "warning", *flags]
    with (work / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield address(process, name)
        finally:
            process.terminate()
            process.wait()


def address(process: "subprocess.Popen[str]", name: str) -> str:
    """From the table that a server prints before `ready`."""
    url, deadline = "", time.monotonic() + START_S
    assert process.stdout is not None
    for line in process.stdout:
        url = line.split("│")[2].strip() if line.startswith("│ HTTP ") else url
        if line.strip() == "ready":
            return url
        if time.monotonic() > deadline:
            break
    raise SystemExit(f"the server {name!r} has not become ready")


def write(python: Path, report: Path, seconds: float) -> None:
    """Write the summary: versions, and what became of each check."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = {"failure", "error", "skipped"}
    outcomes = {case.get("name", ""): next((part.tag for part in case if part.tag in bad), "passed") for case in cases}
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    asked = subprocess.run([python, "-c", code, *PACKAGES], capture_output=True, text=True, check=True)
    browser = subprocess.run([chromium(), "--version"], capture_output=True, text=True).stdout.strip()
    summary = {
        "what": "the page at /ui in a headless browser, against servers of SmolLM2-135M-Instruct and of a tiny model",
        "browser": browser,
        "packages": dict(zip(PACKAGES, asked.stdout.split(), strict=True)),
        "passed": sum(outcome == "passed" for outcome in outcomes.values()),
        "checks": outcomes,
        "seconds": round(seconds, 1),
        **describe_source().describe(),
    }
    RESULT.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

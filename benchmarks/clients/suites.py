"""Other people's tests, run against the server."""

import os
import re
import subprocess
from pathlib import Path

from clients_table import MODEL, OPENAI_SDIST, SGLANG_WHEEL, Place
from environments import environment, python_files, source_files, versions
from results_of import pytest_summary

HERE = Path(__file__).resolve().parent
OPENAI_TESTS = ("test_completions.py", "chat", "test_models.py")
OTHER_MODELS = re.compile(r"gpt-3\.5-turbo-instruct|gpt-6-astra")
SUITE_S, TEST_S = 1800, 120


def openai_tests(place: Place) -> dict[str, object]:
    """The tests of the openai package's own source for chats, completions and models; they ask for the model served."""
    python = environment(place.work, "sdk")
    folder = source_files(place.work, OPENAI_SDIST)
    for path in (folder / "tests/api_resources").rglob("*.py"):
        path.write_text(OTHER_MODELS.sub(MODEL, path.read_text()))
    tests = [f"tests/api_resources/{part}" for part in OPENAI_TESTS]
    own = {"TEST_API_BASE_URL": f"{place.url}/v1"}
    return {"tests_of": OPENAI_SDIST, **_pytest(place.work, python, tests, folder, own, "openai_sdist")}


def sglang_kits(place: Place) -> dict[str, object]:
    """SGLang's server test kits that need nothing of sglang."""
    python = environment(place.work, "sdk")
    kits = python_files(place.work, SGLANG_WHEEL) / "sglang/test/kits"
    plain = ["-c", os.devnull, "-p", "no:asyncio", str(HERE / "cases/test_kits.py")]
    own = {"BASE_URL": place.url, "MODEL": MODEL, "TOKENIZER": str(place.tokenizer), "KITS": str(kits)}
    return {"tests_of": SGLANG_WHEEL, **_pytest(place.work, python, plain, HERE, own, "sglang_kits")}


def _pytest(
    work: Path, python: Path, arguments: list[str], folder: Path, own: dict[str, str], suite: str
) -> dict[str, object]:
    flags = ["-q", "-rA", "--timeout", str(TEST_S), "-p", "no:cacheprovider"]
    command = [str(python), "-m", "pytest", *flags, *arguments]
    log = work / f"{suite}.log"
    with log.open("w") as out:
        subprocess.run(command, cwd=folder, env=os.environ | own, stdout=out, timeout=SUITE_S)
    used = versions(python, ("openai", "anthropic", "pytest"))
    return {"versions": used, **pytest_summary(log.read_text())}

"""The code of the documents runs: README's client against a server, and the method of docs/extending.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import COMMAND_S, Service, environment

ROOT = Path(__file__).parents[2]
ASK = """
import asyncio
import sys
from overlap_spec import Engine, EngineConfig, SamplingParams

async def main(model):
    answers, greedy = [], SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True)
    for method in ("NONE", "repeat:REPEAT"):
        config = EngineConfig(
            model_path=model, dtype="float64", max_total_tokens=2000, log_level="warning", speculative_algorithm=method
        )
        async with Engine(config) as engine:
            answers.append(await engine.client.complete("One, two, three", greedy))
    assert answers[0].token_ids == answers[1].token_ids and len(answers[1].token_ids) == 32
    assert 0 < answers[1].usage.spec_verify_ct <= 31
    print("equal")

asyncio.run(main(sys.argv[1]))
"""


def python_of(name: str) -> str:
    """The first fenced Python of a document."""
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def run_python(tmp_path: Path, code: str, *words: str, **extra: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_S, env=environment(tmp_path) | extra, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_of_the_readme_streams(service: Service, tmp_path: Path) -> None:
    code = python_of("README.md").replace("http://127.0.0.1:30000", service.url).replace('"smollm2"', '"tiny"')
    assert service.url in code and '"tiny"' in code
    assert run_python(tmp_path, code.replace("temperature=0,", "temperature=0, max_tokens=16,"))


@pytest.mark.full
def test_the_method_of_the_documents_changes_no_token(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "repeat.py").write_text(python_of("docs/extending.md"))
    path = environment(tmp_path)["PYTHONPATH"]
    assert run_python(tmp_path, ASK, str(tiny_model), PYTHONPATH=f"{tmp_path}:{path}") == "equal\n"

"""Every example runs as its docstring says, on the tiny model."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.command_line import COMMAND_S, Service, environment

from overlap_spec import Client

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 80


def run_example(name: str, tmp_path: Path, *words: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
def test_the_engine_in_a_program(tiny_model: Path, tmp_path: Path) -> None:
    output = run_example("01_chat.py", tmp_path, str(tiny_model), "Hello")
    assert "[64 tokens]" in output
    assert "[same seed, same tokens: True]" in output


def test_a_client_over_zeromq(service: Service, tmp_path: Path) -> None:
    async def num_aborted() -> int:
        async with Client(service.endpoint) as client:
            return (await client.stats()).aborted_total

    before = asyncio.run(num_aborted())
    output = run_example("02_stream_client.py", tmp_path, service.endpoint)
    left = re.search(r"left after (\d+) of 1000 tokens", output)
    assert left is not None and 10 <= int(left[1]) < 1000, "on busy cores many tokens come at once"
    assert "8 answers, " in output
    assert f", {before + 1} aborted, " in output


@pytest.mark.slow
def test_the_openai_client(service: Service, tmp_path: Path) -> None:
    assert "[tiny: " in run_example("03_openai_stream.py", tmp_path, service.url)


@pytest.mark.full
def test_the_two_timelines(tiny_model: Path, tmp_path: Path) -> None:
    output = run_example("04_timeline.py", tmp_path, str(tiny_model))
    assert "1 in flight: " in output and "2 in flight: " in output
    for row in ("queued", "device", "settled"):
        assert sum(line.startswith(f"{row:8} |") for line in output.splitlines()) == 2


@pytest.mark.slow
def test_a_method_of_ones_own(tiny_model: Path, tmp_path: Path) -> None:
    output = run_example("05_toy_proposer.py", tmp_path, str(tiny_model))
    assert "tokens are those of plain decoding: True" in output
    assert float(output.split("accept length: ")[1]) > 1
    assert len((EXAMPLES / "05_toy_proposer.py").read_text().splitlines()) < 60


@pytest.mark.full
def test_a_verifier_of_ones_own(tiny_model: Path, tmp_path: Path) -> None:
    output = run_example("06_typical_acceptance.py", tmp_path, str(tiny_model), str(tiny_model / "head"))
    matching, typical, greedy = output.splitlines()
    assert matching.startswith("match (exact, token for token): accept length ")
    assert typical.startswith("typical acceptance: LOSSY at temperature > 0: accept length ")
    accept_lens = [float(line.split("accept length ")[1].split()[0]) for line in (matching, typical)]
    assert 1 < accept_lens[0] < accept_lens[1]
    assert greedy == "greedy tokens are the same: True"


@pytest.mark.slow
def test_an_own_verifier_is_said_to_be_lossy_by_table_log_and_server(
    tiny_model: Path, tiny_flags: tuple[str, ...], tmp_path: Path
) -> None:
    """The flags of a method that has a verifier of its own: what it does not do, it refuses."""
    flags = ("06_typical_acceptance:TYPICAL" if flag == "EAGLE3" else flag for flag in tiny_flags)
    said = "typical acceptance: LOSSY at temperature > 0"
    path = f"{EXAMPLES}{os.pathsep}{environment(tmp_path)['PYTHONPATH']}"
    with Service(tmp_path, *flags, PYTHONPATH=path) as service:
        assert said in "\n".join(service.lines)
        assert service.get("/server_info").json()["verification"] == said
        assert service.logs(f"verification: {said}"), service.log()


@pytest.mark.slow
def test_a_feature_of_ones_own(tiny_flags: tuple[str, ...], tmp_path: Path) -> None:
    """Every guess that was not accepted is in the log, beside the token that the answer has in its place."""
    path = f"{EXAMPLES}{os.pathsep}{environment(tmp_path)['PYTHONPATH']}"
    numbers = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
    flags = (*tiny_flags, *numbers, "--feature", "rejected_guesses", "--log-level", "info")
    asked = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    with Service(tmp_path, *flags, PYTHONPATH=path) as service:
        body = {"input_ids": [5, 17, 42, 9], "sampling_params": asked}
        answer = httpx.post(f"{service.url}/generate", json=body, timeout=60).json()
        assert service.logs(" rejected, ")
    logged = re.findall(r"step (\d+): (\d+) rejected, (\d+) drawn", service.log())
    steps, rejected, drawn = (list(map(int, column)) for column in zip(*logged, strict=True))
    assert steps == sorted(set(steps)) and len(steps) <= answer["meta_info"]["spec_verify_ct"]
    assert all(guess != token for guess, token in zip(rejected, drawn, strict=True))
    output = iter(answer["output_ids"])
    assert len(drawn) > 5
    assert all(token in output for token in drawn[:-1])  # in this order; the last step may draw more than was asked for
    assert len((EXAMPLES / "rejected_guesses" / "worker.py").read_text().splitlines()) < 60


@pytest.mark.full
def test_a_logit_processor_of_ones_own(tiny_model: Path, tmp_path: Path) -> None:
    output = run_example("07_no_repeated_trigram.py", tmp_path, str(tiny_model))
    assert ", 0 with it" in output and "trigrams: 0 without" not in output
    assert "tokens are those of plain decoding: True" in output


def test_every_example_is_short_and_run_in_some_test() -> None:
    """Named as a file, or as a module that a flag loads: `08_planted_fault:planted`."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_e2e_*.py"))
    examples = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert set(examples) == set(re.findall(r'"(\d\d_\w+)[.:]\w+"', tests))
    assert all(len(path.read_text().splitlines()) <= MAX_LINES for path in examples.values())

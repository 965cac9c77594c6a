"""`overlap-spec verify` in real processes: what is right is status 0, and a fault that is planted is found."""

import json
from pathlib import Path

import pytest
from support.command_line import run_command

EXAMPLES = Path(__file__).parents[2] / "examples"
CHAT = [{"role": "user", "content": "Hello"}]
# Every step is as wide, whatever pays on this machine: a fault that depends on the width comes again.
SAME_WIDTH = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
LINES = (
    {"text": "Hello", "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}},
    {"messages": CHAT, "sampling_params": {"temperature": 0.9, "top_p": 0.9, "max_new_tokens": 40}},
    {"input_ids": [7, 8, 9], "sampling_params": {"max_new_tokens": 40, "ignore_eos": True, "seed": 3}},
)


def write_prompts(path: Path, *lines: dict[str, object]) -> str:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


@pytest.mark.full
def test_what_is_plain_decodings_is_status_0(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    prompts, report = write_prompts(tmp_path / "prompts.jsonl", *LINES), tmp_path / "report.json"
    done = run_command(tmp_path, "verify", prompts, *tiny_flags, "--output", str(report))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "3 of 3 audited" in done.stdout and done.stdout.endswith("\nEvery token is plain decoding's.\n")
    written = json.loads(report.read_bytes())
    assert written["status"] == 0 and written["audit"]["figures"]["tokens"] > 80
    assert written["tokens_per_step"] >= 1, "steps had guesses"
    assert written["differences"] == written["faults"] == []


@pytest.mark.slow
def test_a_planted_fault_is_status_1_and_runs_again(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    """`Can I trust it?` in docs/correctness.md has these commands."""
    prompts, report = write_prompts(tmp_path / "prompts.jsonl", LINES[1]), tmp_path / "report.json"
    planted = ("--logit-processor", "08_planted_fault:planted")
    words = (*tiny_flags, *SAME_WIDTH, "--output", str(report))
    path = f"{EXAMPLES}:{Path.cwd()}:{EXAMPLES.parent}/tests"
    done = run_command(tmp_path, "verify", prompts, *words, *planted, PYTHONPATH=path)
    assert done.returncode == 1, done.stderr + done.stdout
    first = json.loads(report.read_bytes())
    fault = first["faults"][0]
    shown = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert "FAULT " in done.stdout and shown == [fault["run_again"]]
    assert fault["output_ids"] and Path(first["audit"]["fault_file"]).is_file()
    again = write_prompts(tmp_path / "again.jsonl", fault["run_again"])
    done = run_command(tmp_path, "verify", again, *words, *planted, PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    second = json.loads(report.read_bytes())["faults"][0]
    assert second["output_ids"] == fault["output_ids"], "the line has all that makes the tokens"
    assert run_command(tmp_path, "verify", again, *words).returncode == 0, "the fault was the planted one"

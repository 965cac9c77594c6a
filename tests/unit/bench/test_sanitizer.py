"""What benchmarks/sanitizer.py makes of the sanitizer's output, with a program in its place."""

import argparse
import asyncio
from pathlib import Path

import pytest
from sanitizer import KERNELS, TOOLS, Row, case_of, checked, command_of, measured

CLEAN = {
    "memcheck": "1 passed in 3.2s\n========= ERROR SUMMARY: 0 errors",
    "racecheck": "1 passed in 9.9s\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}


def program(tmp_path: Path, script: str) -> str:
    path = tmp_path / "sanitizer"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def row(tmp_path: Path, script: str, tool: str = "memcheck", limit_s: float = 20.0) -> Row:
    return asyncio.run(checked(program(tmp_path, script), tool, "wide_linear", limit_s))


@pytest.mark.parametrize("tool", TOOLS)
def test_a_clean_check(tool: str, tmp_path: Path) -> None:
    found = row(tmp_path, f"echo '{CLEAN[tool]}'", tool)
    assert (found["found"], found["case_passed"], found["exit_status"]) == (0, True, 0) and "output" not in found


def test_what_is_found_is_noted(tmp_path: Path) -> None:
    text = "========= Invalid read\n=========\n1 passed in 3s\n========= ERROR SUMMARY: 3 errors"
    found = row(tmp_path, f"echo '{text}'; exit 9")
    assert (found["found"], found["summary"], found["exit_status"]) == (3, "3 errors", 9)
    assert found["output"][0] == "========= Invalid read" and len(found["output"]) == 3


def test_a_case_that_did_not_run_is_not_clean(tmp_path: Path) -> None:
    found = row(tmp_path, "echo '1 skipped in 3s'; echo '========= ERROR SUMMARY: 0 errors'")
    assert found["found"] == 0 and not found["case_passed"] and found["output"]


def test_a_check_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    found = row(tmp_path, "echo begun; exec sleep 30", limit_s=0.3)
    assert (found["found"], found["exit_status"], found["output"]) == (None, None, ["begun"])


def test_every_kernel_has_its_case_and_is_checked_by_every_tool(tmp_path: Path) -> None:
    cases = (Path(__file__).parent.parent.parent / "gpu" / "test_sanitizer_cases_cuda.py").read_text()
    assert all(f"def {case_of(kernel)}() ->" in cases for kernel in KERNELS)
    assert command_of("sanitizer", "racecheck", "packed_stream")[-1].endswith("[packed_stream]")
    otherwise = command_of("sanitizer", "memcheck", "packed_stream, every lane arrives")
    assert "kns=packed_stream" in otherwise and otherwise[-1].endswith("[packed_stream_every_lane_arrives]")
    arguments = argparse.Namespace(kernels=KERNELS, tools=TOOLS, sanitizer=program(tmp_path, "exit 3"), limit_s=20.0)
    rows = asyncio.run(measured(arguments))
    assert [(each["kernel"], each["tool"]) for each in rows] == [(k, t) for k in KERNELS for t in TOOLS]

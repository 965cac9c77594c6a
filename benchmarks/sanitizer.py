"""compute-sanitizer on the kernels in CUDA C++: accesses out of bounds (memcheck) and races (racecheck), by kernel.

    python benchmarks/sanitizer.py --output benchmarks/results/sanitizer_h200.json

Each check runs a case of tests/gpu/test_sanitizer_cases_cuda.py in a process of its own, all beside each other, and
looks at one kernel. Of each the report has the sanitizer's summary, what it found first, and whether the case passed.

Where the lanes of a warp leave sums and, after `__syncwarp`, one arrives at a barrier for all, racecheck may not know
the order. So packed_stream is also checked with the arrival of every lane, as nothing else uses it.
"""

import argparse
import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from overlap_spec.bench.report import describe_run, write_report

ROOT = Path(__file__).parent.parent
CASES = "tests/gpu/test_sanitizer_cases_cuda.py"
EVERY_LANE = "packed_stream, every lane arrives"  # a kernel, and how
KERNELS = ("wide_linear", "packed_stream", EVERY_LANE, "packed_products", "short_decode")
TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--report-api-errors", "no"),  # cuda-bindings asks for functions that the driver does not have
    "racecheck": (),
}
SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: ((\d+) .*)")
NOTED_LINES = 12  # of what was found
Row = dict[str, Any]


def command_of(sanitizer: str, tool: str, kernel: str) -> list[str]:
    """Without torch's caching, what lies beside a tensor is no memory of the process."""
    name = f"kns={kernel.partition(',')[0]}"
    check = [sanitizer, "--tool", tool, *TOOLS[tool], "--kernel-name", name, "--error-exitcode", "9"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "cuda"]
    return [*check, *pytest, f"{CASES}::test_every_kernel_in_cuda[{case_of(kernel)}]"]


def case_of(kernel: str) -> str:
    """The function that runs it."""
    return re.sub(r"\W+", "_", kernel)


def row_of(tool: str, kernel: str, output: str, status: int | None, seconds: float) -> Row:
    """What a check found. `status`: None if it was stopped."""
    found = SUMMARY.search(output)
    row: Row = {
        "tool": tool,
        "kernel": kernel,
        "summary": found[1] if found else "none: the sanitizer did not end",
        "found": int(found[2]) if found else None,
        "case_passed": bool(re.search(r"^1 passed", output, re.MULTILINE)),
        "exit_status": status,
        "seconds": round(seconds, 1),
    }
    if row["found"] != 0 or not row["case_passed"]:
        row["output"] = [line for line in output.splitlines() if line.strip("= ")][:NOTED_LINES]
    return row


async def checked(sanitizer: str, tool: str, kernel: str, limit_s: float) -> Row:
    """Run one check for so long at most."""
    begun, chunks = time.monotonic(), bytearray()
    process = await asyncio.create_subprocess_exec(
        *command_of(sanitizer, tool, kernel),
        cwd=ROOT,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(limit_s):
            while chunk := await process.stdout.read(1 << 16):
                chunks += chunk
            await process.wait()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)  # the sanitizer and the process that it watches
        await process.wait()
    status = process.returncode if time.monotonic() - begun < limit_s else None
    row = row_of(tool, kernel, chunks.decode(errors="replace"), status, time.monotonic() - begun)
    print(f"{tool} {kernel}: {row['summary']}, {row['seconds']} s", flush=True)
    return row


async def measured(arguments: argparse.Namespace) -> list[Row]:
    """All checks, beside each other."""
    pairs = [(tool, kernel) for kernel in arguments.kernels for tool in arguments.tools]
    return await asyncio.gather(*(checked(arguments.sanitizer, *pair, arguments.limit_s) for pair in pairs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--tools", nargs="+", default=tuple(TOOLS), choices=TOOLS)
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="its program")
    parser.add_argument("--limit-s", type=float, default=120.0, help="of a check")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    run = describe_run(device, torch.get_num_threads(), ("tests",))
    checks = asyncio.run(measured(arguments))
    write_report(arguments.output, {"benchmark": "sanitizer", "run": run, "checks": checks})
    return 0 if all(row["found"] == 0 and row["case_passed"] for row in checks) else 1


if __name__ == "__main__":
    sys.exit(main())

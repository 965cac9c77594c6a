"""Times every kernel on one GPU and writes the report: `python benchmarks/kernels.py --output FILE`."""

import argparse
import sys

import torch
from kernel_cases.benchmark import run
from kernel_cases.step_cases import NUM_ROWS

from overlap_spec.bench.report import describe_run, write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="JSON file to write")
    parser.add_argument("--rows", type=int, nargs="+", default=NUM_ROWS, help="of step ops")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that compile and check step ops before the clock"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernels.py: no CUDA device")
    facts = describe_run(torch.cuda.get_device_name(), 1)
    write_report(arguments.output, {"benchmark": "kernels", "run": facts, **run(tuple(arguments.rows), arguments.jobs)})


if __name__ == "__main__":
    main()

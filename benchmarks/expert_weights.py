"""Times the experts of gpt-oss-20b in mxfp4 on one GPU: us a layer, and which part of its bandwidth that is.

    python benchmarks/expert_weights.py [--rows 1 8 32]

Layers take turns in a CUDA graph, more of them than the L2 cache holds. It needs a GPU with 20 GB.
"""

import argparse
import sys

import torch
from kernel_cases.benchmark import ROTATED_BYTES, graph_us
from kernel_cases.expert_cases import GPT_OSS_20B, expert_cases
from kernel_cases.step_cases import Place

BANDWIDTH = 4.2e12  # bytes/s that an H200's linears reach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/expert_weights.py: no CUDA device")
    torch.manual_seed(0)
    for case in expert_cases("gpt-oss-20b", GPT_OSS_20B, Place("cuda", 4 * ROTATED_BYTES, tuple(arguments.rows))):
        case.check()
        time_us = graph_us(case.calls)
        share = case.num_bytes / BANDWIDTH / (time_us * 1e-6)
        print(f"{case.num_rows:4} rows, {case.workload:22} {time_us:8.1f} us, {share:6.1%} of 4.2 TB/s", flush=True)


if __name__ == "__main__":
    main()

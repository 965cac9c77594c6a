"""Latent attention alone, in a CUDA graph: microseconds of a layer, and the share of 4.2 TB/s at which keys are read.

python benchmarks/latent_attention.py --output latent_attention.json                     about a minute on an H200
python benchmarks/latent_attention.py --models DeepSeek-V3 --batch-sizes 1 --units 64 128 256 --output ..
"""

import argparse
import itertools

import torch
from kernel_cases.benchmark import ROTATED_BYTES, graph_us
from kernel_cases.latent_cases import FORMATS, MODELS, Work, latent_cases
from kernel_cases.step_cases import Place
from overlap_spec_kernels.attention.latent_attention import UNIT

from overlap_spec.bench.report import describe_run, write_report

BYTES_PER_US = 4.2e6  # of an H200's memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="JSON file to write")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["GLM-4.7-Flash"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32768])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4], help="rows of a request")
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=["bfloat16", "fp8_e4m3"])
    parser.add_argument("--units", type=int, nargs="+", default=[UNIT], help="keys of a request's first pieces")
    given = parser.parse_args()
    sizes = itertools.product(given.batch_sizes, given.contexts, given.widths, given.formats)
    works, place, measured = tuple(Work(*size) for size in sizes), Place("cuda", ROTATED_BYTES), []
    torch.manual_seed(0)
    for model, unit in itertools.product(given.models, given.units):
        for case in latent_cases(model, works, place, unit):
            case.check()
            time_us = graph_us(case.calls)
            row = {"model": model, "unit": unit, "work": case.workload, "bytes": case.num_bytes, "time_us": time_us}
            measured.append(row | {"share": (share := case.num_bytes / time_us / BYTES_PER_US)})
            print(f"{model:18} {case.workload:34} {unit:4} {time_us:9.2f} us {share:6.1%}", flush=True)
    facts = describe_run(torch.cuda.get_device_name(), 1)
    write_report(given.output, {"benchmark": "latent_attention", "run": facts, "measurements": measured})


if __name__ == "__main__":
    main()

"""Two forms of a float32 linear map on a CPU: BLAS with few columns against oneDNN's packed weight (models/layers.py).

    OMP_WAIT_POLICY=PASSIVE python benchmarks/cpu_linear.py --output benchmarks/results/linear_cpu.json

The four maps of SmolLM2's 30 layers, each with a weight of its own, ms for all of them.
"""

import argparse
import time
from collections.abc import Callable

import torch

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.models.layers.linear import Linear, make_linear

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS, REPEATS = 30, 6


def median_ms(work: Callable[[], None]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return round(1000 * sorted(times)[REPEATS // 2], 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    weights = [[torch.randn(shape) for _ in range(LAYERS)] for shape in SHAPES]
    forms = {
        "weight @ x.T": [[Linear(weight) for weight in maps] for maps in weights],
        "packed": [[make_linear(weight) for weight in maps] for maps in weights],
    }
    figures = []
    for rows in (1, 2, 4, 6, 16, 64):
        row: dict[str, float] = {"rows": rows}
        for name, layers in forms.items():
            inputs = [torch.randn(rows, width) for _, width in SHAPES]

            def work(layers=layers, inputs=inputs) -> None:
                for maps, x in zip(layers, inputs, strict=True):
                    for linear in maps:
                        linear(x)

            row[name] = median_ms(work)
        figures.append(row)
        print(row, flush=True)
    run = describe_run("cpu", torch.get_num_threads())
    write_report(arguments.output, {"benchmark": "linear", "run": run, "figures": figures})


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

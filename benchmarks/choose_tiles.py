"""Times the linears of an 8B layer for 17 to 128 rows, with several tile sizes, against a BLAS and the row kernels.

    python benchmarks/choose_tiles.py --output benchmarks/results/choosing/tiles_h200.json

`tiles_for` (kernels/overlap_spec_kernels/linear/warpgroup_linear.py) chooses by this table. Every variant is a chain of
launches in one CUDA graph, over weights that do not fit into the L2 cache. It needs a Hopper GPU.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from overlap_spec_kernels import Norm, Normed
from overlap_spec_kernels.linear.call import Addition, call_of
from overlap_spec_kernels.linear.dense import fused_linear_reference, linear_add_reference
from overlap_spec_kernels.linear.warpgroup_linear import Tiles
from torch import Tensor

from overlap_spec.bench.report import describe_run, write_report

SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
WAYS = {
    32: [Tiles(64, 128, 8), Tiles(64, 64, 16), Tiles(64, 128, 8, 2), Tiles(128, 128, 5, 2), Tiles(128, 128, 5, 4)],
    64: [Tiles(64, 128, 6), Tiles(64, 128, 6, 2), Tiles(128, 64, 7, 2), Tiles(128, 64, 7, 4, 8)],
    128: [Tiles(64, 64, 8), Tiles(64, 128, 4), Tiles(64, 64, 8, 2), Tiles(128, 64, 6, 4, 8)],
}
GATED_WAYS = {
    32: [Tiles(64, 128, 5), Tiles(64, 64, 10), Tiles(128, 64, 5)],
    64: [Tiles(64, 128, 4), Tiles(64, 64, 8), Tiles(128, 64, 4, warps=8)],
    128: [Tiles(64, 64, 6), Tiles(64, 128, 3), Tiles(128, 64, 4, warps=8)],
}
BYTES = 6e8  # of weights that a graph reads
BANDWIDTH = 4.23e12  # of a copy, bytes a second


class Map:
    """One map of the layer with random weights, many times over."""

    def __init__(self, name: str, num_rows: int) -> None:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        size_n, size_k = SHAPES[name]
        self.gated, self.adds = name == "gate, up", name in ("output", "down")
        self.weights = [drawn(size_n, size_k) * 0.02 for _ in range(max(3, int(BYTES / (2 * size_n * size_k))))]
        rows = drawn(num_rows, size_k)
        self.x = rows if self.adds else Normed(rows, rows, torch.rand(16, num_rows, device="cuda") * size_k / 16, 1e-5)
        norm = Norm(torch.ones(size_n, device="cuda", dtype=torch.bfloat16), 1e-5)
        self.add = Addition(drawn(num_rows, size_n), norm)

    def by_blas(self, weight: Tensor) -> Tensor:
        """And the kernels of rows; the norm before the map is not counted."""
        if isinstance(self.x, Normed):
            return fused_linear_reference(self.x.weighted, weight, self.gated)
        return linear_add_reference(self.x, weight, *self.add).values

    def by_tiles(self, weight: Tensor, tiles: Tiles) -> None:
        """As `fused_linear` and `linear_add` do it."""
        add = self.add if self.adds else None
        call = call_of(self.x, weight, self.gated, add, torch.bfloat16, tiles.block_n)
        tiles.run(call, tiles.num_programs(weight, self.gated))


def microseconds(run: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    """Of a launch in a graph of one for each weight: the median of eight replays."""
    for weight in weights:
        run(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / len(weights))
    return round(statistics.median(times[2:]), 2)


def figures(name: str, num_rows: int) -> dict[str, Any]:
    """One map with so many rows, in microseconds."""
    a_map = Map(name, num_rows)
    ways = (GATED_WAYS if a_map.gated else WAYS)[num_rows]
    tried = [
        {**tiles._asdict(), "us": microseconds(partial(a_map.by_tiles, tiles=tiles), a_map.weights)} for tiles in ways
    ]
    size_n, size_k = SHAPES[name]
    return {
        "map": name,
        "rows": num_rows,
        "reading_us": round(2e6 * size_n * size_k / BANDWIDTH, 2),
        "blas_us": microseconds(a_map.by_blas, a_map.weights),
        "tiles": sorted(tried, key=lambda way: float(way["us"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    rows = []
    for num_rows in WAYS:
        for name in SHAPES:
            rows.append(figures(name, num_rows))
            print(rows[-1], flush=True)
            torch.cuda.empty_cache()
    if arguments.output:
        facts = describe_run(torch.cuda.get_device_name(), 1)
        write_report(arguments.output, {"benchmark": "choose_tiles", "run": facts, "figures": rows})


if __name__ == "__main__":
    main()

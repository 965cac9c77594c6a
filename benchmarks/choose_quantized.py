"""Times the linears of an 8B layer in 8 and 4 bits, cut up in several ways, against the time to read the weight.

    python benchmarks/choose_quantized.py --output benchmarks/results/choosing/quantized_h200.json

`stream_of` and `tiles_of` (kernels/overlap_spec_kernels/linear/quantized_*.py) choose by this table. Every variant is a
chain of launches in one CUDA graph, over weights that do not fit into the L2 cache, and its result is compared with the
product of the dequantised weight. It needs a Hopper GPU.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from choose_tiles import BANDWIDTH, BYTES, SHAPES, microseconds
from overlap_spec_kernels import DenseWeight, Norm, Normed, compiling_together
from overlap_spec_kernels.linear.call import Addition
from overlap_spec_kernels.linear.packing import Packing, dequantised
from overlap_spec_kernels.linear.quantized import QuantizedWeight
from overlap_spec_kernels.linear.quantized_stream import QuantizedStream
from overlap_spec_kernels.linear.quantized_tiles import QuantizedTiles
from torch import Tensor

from overlap_spec.bench.report import describe_run, write_report

Cut = QuantizedStream | QuantizedTiles
BFLOAT = torch.bfloat16
FORMATS = {"fp8": (8, 0), "int4": (4, 128)}  # bits, columns that share a scale
ROWS = (4, 16, 32, 64, 128)
ERROR = 6e-3  # of a norm over a norm
PROCESSES = 12


class Linear:
    """One linear of the layer with random weights, many times over."""

    def __init__(self, name: str, kind: str, num_rows: int, copies: int | None = None) -> None:
        self.size_n, self.size_k = SHAPES[name]
        self.bits, group = FORMATS[kind]
        self.gated, self.adds = name == "gate, up", name in ("output", "down")
        row_bytes = self.size_k * self.bits // 8
        copies = copies or max(3, int(BYTES / (self.size_n * row_bytes)))
        scales = torch.full((self.size_k // group if group else 1, self.size_n), 2e-3, device="cuda")
        packing = Packing(scales.to(BFLOAT) if group else scales, None, self.bits, 128, group)
        data = (
            torch.randint(0, 120, (self.size_n, row_bytes), device="cuda", dtype=torch.uint8) for _ in range(copies)
        )
        self.weights = [QuantizedWeight(each, packing, BFLOAT) for each in data]
        self.rows = torch.randn(num_rows, self.size_k, device="cuda", dtype=BFLOAT)
        squares = torch.rand(16, num_rows, device="cuda") * self.size_k / 16 + 1
        self.x = self.rows if self.adds else Normed(self.rows, self.rows, squares, 1e-5)
        norm = Norm(torch.ones(self.size_n, device="cuda", dtype=BFLOAT), 1e-5)
        self.add = Addition(torch.randn(num_rows, self.size_n, device="cuda", dtype=BFLOAT), norm)

    def run(self, weight: QuantizedWeight, cut: Cut) -> Tensor:
        """As `fused_linear` and `linear_add` do it."""
        return weight.launch(cut, self.x, self.gated, self.add if self.adds else None, BFLOAT).values

    def dense(self, weight: Tensor) -> None:
        """The same in 16 bits."""
        dense = DenseWeight(weight)
        if self.adds:
            dense.add(self.rows, *self.add)
        elif self.gated:
            dense.gated(self.x)
        else:
            dense.product(self.x)

    def error(self, cut: Cut) -> float:
        """Of the first weight's result."""
        weight = self.weights[0]
        wide = self.x.weighted.double() if isinstance(self.x, Normed) else self.x.double()
        if isinstance(self.x, Normed) and self.x.squares is not None:
            wide *= torch.rsqrt(self.x.squares.double().sum(0) / self.size_k + self.x.eps)[:, None]
        expected = wide @ dequantised(weight.data, weight.packing, torch.float64).t()
        if self.gated:
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        if self.adds:
            expected += self.add.residual.double()
        return float((self.run(weight, cut).double() - expected).norm() / expected.norm())


def streams(rows: int, linear: Linear) -> Iterator[QuantizedStream]:
    """Ways to stream, each with as many stages as a ring of so many bytes holds."""
    ways = [(16, 4, 1, 1, 2), (16, 4, 1, 2, 2), (16, 8, 1, 1, 2), (16, 4, 1, 1, 3), (16, 4, 1, 1, 4), (16, 4, 1, 2, 3)]
    if rows > 8:
        ways = [(16, 4, 1, 1, 2), (32, 4, 2, 1, 1)] if rows <= 16 else [(32, 4, 2, 1, 1), (64, 2, 4, 1, 1)]
    padded = 8 if rows <= 8 else min(1 << (rows - 1).bit_length(), 32)
    for block_n, warps_k, warps_n, runs, per_sm in ways:
        tile = block_n * (2 if linear.gated else 1) * (128 * linear.bits // 8 + (2 if linear.bits == 4 else 0))
        stage = runs * warps_k * (tile + 128 * padded * 2)
        if (stages := min((216 << 10) // per_sm // stage, 16)) >= 2:
            yield QuantizedStream(block_n, warps_k, warps_n, stages, runs, per_sm)


def tiles(rows: int, linear: Linear) -> Iterator[QuantizedTiles]:
    """Ways to take tiles."""
    padded = max(1 << (rows - 1).bit_length(), 8)
    for block_n, warps, per_sm in ((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 8, 1)):
        if (rows <= 32 and warps == 8) or (rows > 32 and per_sm > 2):
            continue
        stage = 128 * ((2 if linear.gated else 1) * block_n + 2 * padded)
        if (stages := min((216 << 10) // per_sm // stage, 12)) < 2:
            continue
        items = linear.size_n // block_n // (2 if linear.gated else 1)
        slots = 132 * per_sm
        splits = [
            n for n in (1, 2, 4, 8, 16) if slots * 0.6 < items * n < slots * 2.2 and linear.size_k // 128 % n == 0
        ]
        for count in (1,) if linear.gated else splits[:3]:
            yield QuantizedTiles(block_n, stages, count, warps, per_sm)


def ways(rows: int, linear: Linear) -> list[Cut]:
    """All that are tried."""
    few = list(streams(rows, linear)) if rows <= 16 or linear.bits == 4 else []
    return [*few, *(tiles(rows, linear) if linear.bits == 8 else ())]


def compile_all(formats: list[str]) -> None:
    """Many at once, in processes."""
    with compiling_together(PROCESSES):
        for kind in formats:
            for name in SHAPES:
                for rows in ROWS:
                    linear = Linear(name, kind, rows, copies=1)
                    for cut in ways(rows, linear):
                        linear.run(linear.weights[0], cut)


def figures(name: str, kind: str, rows: int) -> dict[str, Any]:
    """One linear with so many rows, in microseconds."""
    linear, tried = Linear(name, kind, rows), []
    for cut in ways(rows, linear):
        way: dict[str, Any] = {"kernel": type(cut).__name__, **cut._asdict()}
        try:
            error = linear.error(cut)
            weights: list[Any] = linear.weights
            way |= {"us": microseconds(partial(linear.run, cut=cut), weights), "error": round(error, 5)}
            way |= {"wrong": True} if not error < ERROR else {}
        except Exception as failure:
            way |= {"us": float("inf"), "failed": str(failure).splitlines()[0][:120]}
        tried.append(way)
    return {
        "linear": name,
        "format": kind,
        "rows": rows,
        "reading_us": round(1e6 * linear.weights[0].num_bytes / BANDWIDTH, 2),
        "ways": sorted(tried, key=lambda way: float(way["us"])),
    }


def dense_figures(name: str, rows: int) -> float:
    """The same in 16 bits, as it is served now."""
    linear = Linear(name, "fp8", rows, copies=1)
    size = SHAPES[name]
    matrices = [
        torch.randn(*size, device="cuda", dtype=BFLOAT) * 0.02
        for _ in range(max(3, int(BYTES / (2 * size[0] * size[1]))))
    ]
    return microseconds(linear.dense, matrices)


def show(figure: dict[str, Any]) -> None:
    """One line: the time to read, 16 bits, and the best ways."""
    best = figure["ways"][0]["us"]
    share = figure["reading_us"] / best
    head = f"{figure['format']:5} {figure['linear']:9} {figure['rows']:4}  reads {figure['reading_us']:6.2f}"
    print(f"{head}  bf16 {figure['bf16_us']:6.2f}  best {best:6.2f} ({share:.0%})", flush=True)
    for way in figure["ways"][:4] + [way for way in figure["ways"][4:] if "wrong" in way or "failed" in way]:
        print("        ", {key: value for key, value in way.items() if value is not False}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    arguments = parser.parse_args()
    try:
        compile_all(arguments.formats)
    except Exception as failure:
        print(f"compiling one after another: {failure!r}", flush=True)
    rows: list[dict[str, Any]] = []
    dense = {(name, count): dense_figures(name, count) for name in SHAPES for count in ROWS}
    for count in ROWS:
        for kind in arguments.formats:
            for name in SHAPES:
                figure = figures(name, kind, count) | {"bf16_us": dense[name, count]}
                if figure["ways"]:
                    rows.append(figure)
                    show(figure)
    if arguments.output:
        facts = describe_run(torch.cuda.get_device_name(), 1)
        write_report(arguments.output, {"benchmark": "choose_quantized", "run": facts, "figures": rows})


if __name__ == "__main__":
    main()

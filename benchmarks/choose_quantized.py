"""Times the linears of an 8B layer in 8 and 4 bits, cut up in several ways, against the time to read the weight.

    python benchmarks/choose_quantized.py --output benchmarks/results/choosing/quantized_h200.json
    python benchmarks/choose_quantized.py --quick --rows 1 4 8 16
    python benchmarks/choose_quantized.py --quick --dense --rows 17 32 64 128

`stream_of` and `tiles_of` choose by this table, `packed_stream_for` and `packed_products_for` by packed_*_h200.json
beside it, which --quick writes (kernels/overlap_spec_kernels/linear). Every variant is a chain of launches in one CUDA
graph, over weights that do not fit into the L2 cache, and its result is compared with the product of the dequantised
weight. Also timed: the same linear in 16 bits, and the dequantised weight multiplied by a BLAS. It needs a Hopper GPU.
"""

import argparse
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from choose_tiles import BANDWIDTH, BYTES, SHAPES, microseconds
from overlap_spec_kernels import DenseWeight, Norm, Normed, compiling_together
from overlap_spec_kernels.linear.call import Addition
from overlap_spec_kernels.linear.dequantize import dequantize
from overlap_spec_kernels.linear.packed_products import PackedProducts, form_of, in_parts, padded
from overlap_spec_kernels.linear.packed_stream import MOST_ROWS, PackedStream, fitted, padded as stream_rows
from overlap_spec_kernels.linear.packing import Packing, dequantised
from overlap_spec_kernels.linear.quantized import Cut, QuantizedWeight
from overlap_spec_kernels.linear.quantized_stream import QuantizedStream
from overlap_spec_kernels.linear.quantized_tiles import QuantizedTiles
from torch import Tensor

from overlap_spec.bench.report import describe_run, write_report

BFLOAT = torch.bfloat16
FORMATS = {"fp8": (8, 0), "int4": (4, 128)}  # bits, columns that share a scale
ROWS = (4, 16, 32, 64, 128)
ERROR = 6e-3  # of a norm over a norm
MULTIPROCESSORS = 132  # of an H200
# Of `PackedProducts`: blocks, warpgroups, cluster, per_sm; for a gate, for others.
PRODUCTS = {
    True: [(1, 2, 1, 1), (1, 2, 2, 1), (1, 3, 2, 1), (1, 2, 2, 2)],
    False: [(1, 2, 1, 1), (1, 2, 2, 1), (2, 2, 1, 1), (2, 2, 2, 1), (1, 3, 2, 1), (1, 2, 2, 2), (2, 2, 2, 2)],
}
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

    @cached_property
    def in_fragments(self) -> list[QuantizedWeight]:
        return [weight.in_fragments() for weight in self.weights]

    def weights_for(self, cut: Cut) -> list[QuantizedWeight]:
        """In the order that the kernel reads."""
        return self.in_fragments if isinstance(cut, PackedStream | PackedProducts) else self.weights

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

    def dequantised_us(self) -> float:
        """The time to write the weight in 16 bits to a scratch buffer, and to multiply by that."""
        matrix = self.rows.new_empty(self.size_n, self.size_k)

        def run(weight: Any) -> None:
            dequantize(weight.data, weight.packing, matrix)
            self.dense(matrix)

        weights: list[Any] = self.weights
        return microseconds(run, weights)

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
        found = self.run(self.weights_for(cut)[0], cut).double()
        return float((found - expected).norm() / expected.norm())


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


def packed_streams(linear: Linear) -> Iterator[PackedStream]:
    """Stages of two sizes, and half as many warps with twice as many columns each."""
    packing, rows = linear.in_fragments[0].packing, stream_rows(len(linear.rows))
    tiles = 4 if linear.bits == 4 else 2
    wide = PackedStream(tiles=tiles, rows=rows)
    for cut in (wide, wide._replace(tiles=tiles // 2), wide._replace(tiles=2 * tiles, warps=8)):
        if fits := fitted(cut, linear.size_k, linear.gated, packing):
            yield fits


def packed_products(rows: int, linear: Linear) -> Iterator[PackedProducts]:
    """Warpgroups with one or two blocks, two or three of them, copies of x shared or not, numbers of parts of K."""
    form = form_of(linear.in_fragments[0].packing, linear.gated)
    assert form is not None
    most = padded(rows)
    for blocks, warpgroups, cluster, per_sm in PRODUCTS[linear.gated]:
        if per_sm == 2 and most > 64:
            continue
        cut = PackedProducts(most, blocks, 0, 1, warpgroups, cluster, per_sm).with_stages(form)
        if cut is None or (warpgroups == 3 and most * blocks * form.matrices > 128):
            continue
        size_n = linear.size_n // form.matrices
        whole = in_parts(cut, size_n, linear.size_k, MULTIPROCESSORS)
        yield whole
        if whole.splits > 1:
            yield whole._replace(splits=whole.splits - 1)


def ways(rows: int, linear: Linear, quick: bool) -> list[Cut]:
    """All that are tried; if quick, the one in row order that is chosen and those in fragment order."""
    ours: list[Cut] = list(packed_streams(linear)) if rows <= MOST_ROWS else []
    if rows > 8:
        ours += packed_products(rows, linear)
    if quick:
        chosen = linear.weights[0].cut(linear.rows, linear.gated)
        return [*ours, *([] if chosen is None else [chosen])]
    few = list(streams(rows, linear)) if rows <= 16 or linear.bits == 4 else []
    return [*ours, *few, *(tiles(rows, linear) if linear.bits == 8 else ())]


def compile_all(formats: list[str], counts: list[int], quick: bool, dense: bool) -> None:
    """Many at once."""
    with compiling_together(PROCESSES) as compilations, compilations.finding():
        for kind, name, rows in product(formats, SHAPES, counts):
            linear = Linear(name, kind, rows, copies=1)
            for cut in ways(rows, linear, quick):
                linear.run(linear.weights_for(cut)[0], cut)
            if dense:
                linear.dense(linear.rows.new_empty(SHAPES[name]))


def figures(name: str, kind: str, rows: int, quick: bool) -> dict[str, Any]:
    """One linear with so many rows, in microseconds."""
    linear, tried = Linear(name, kind, rows), []
    for cut in ways(rows, linear, quick):
        way: dict[str, Any] = {"kernel": type(cut).__name__, **cut._asdict()}
        try:
            error = linear.error(cut)
            weights: list[Any] = linear.weights_for(cut)
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
    dense = (
        f"  bf16 {figure['bf16_us']:6.2f} dequantised {figure['dequantised_us']:6.2f}" if "bf16_us" in figure else ""
    )
    print(f"{head}{dense}  best {best:6.2f} ({share:.0%})", flush=True)
    for way in figure["ways"][:4] + [way for way in figure["ways"][4:] if "wrong" in way or "failed" in way]:
        print("        ", {key: value for key, value in way.items() if value is not False}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--quick", action="store_true", help="of kernels for row order, only the way that is chosen")
    parser.add_argument("--dense", action="store_true", help="if quick, times in 16 bits all the same")
    arguments = parser.parse_args()
    counts, quick = arguments.rows, arguments.quick
    with_dense = arguments.dense or not quick
    try:
        compile_all(arguments.formats, counts, quick, with_dense)
    except Exception as failure:
        print(f"compiling one after another: {failure!r}", flush=True)
    rows: list[dict[str, Any]] = []
    dense = {} if not with_dense else {(name, count): dense_figures(name, count) for name in SHAPES for count in counts}
    for count in counts:
        for kind in arguments.formats:
            for name in SHAPES:
                figure = figures(name, kind, count, quick)
                if dense:
                    linear = Linear(name, kind, count)
                    figure |= {"bf16_us": dense[name, count], "dequantised_us": linear.dequantised_us()}
                if figure["ways"]:
                    rows.append(figure)
                    show(figure)
    if arguments.output:
        facts = describe_run(torch.cuda.get_device_name(), 1)
        write_report(arguments.output, {"benchmark": "choose_quantized", "run": facts, "figures": rows})


if __name__ == "__main__":
    main()

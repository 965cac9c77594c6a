"""Times whole layers of an 8B model in 8 and 4 bits, as a decode step runs them, with one linear divided otherwise.

    python benchmarks/quantized_layer.py --output benchmarks/results/choosing/quantized_layer_h200.json

A layer is qkv, attention over a short context, output, gate and up, down. `packed_stream_for`
(kernels/overlap_spec_kernels/linear) chooses by this table: a division that is fastest alone need not be so in a layer,
where each kernel begins beside the end of another one. Every variant is a CUDA graph of layers over more weights
than the L2 cache holds. It needs a Hopper GPU.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from choose_tiles import BANDWIDTH, SHAPES
from overlap_spec_kernels import DecodeScratch, Norm, Normed, compiling_together, decode_attention
from overlap_spec_kernels.linear.call import Addition
from overlap_spec_kernels.linear.packed_stream import PackedStream, fitted
from overlap_spec_kernels.linear.packing import Packing, packed
from overlap_spec_kernels.linear.quantized import Cut, QuantizedWeight
from torch import Tensor

from overlap_spec.bench.report import describe_run, write_report

BFLOAT = torch.bfloat16
FORMATS = {"fp8": (8, 0), "int4": (4, 128)}  # bits, columns that share a scale
LAYERS, DISTINCT = 16, 4  # of a graph; so many have weights of their own
CONTEXT, PAGE, KV_HEADS, DIM = 256, 16, 8, 128
EPS = 1e-5
PART = 128  # columns of a run in row order
PROCESSES = 12


class Variant(NamedTuple):
    """A way to run the layers."""

    name: str
    in_rows: bool = False
    cuts: dict[str, PackedStream] = {}  # other divisions than the chosen ones


class Layers:
    """Weights of some layers, and the other inputs of a step of one request."""

    def __init__(self, kind: str, num_rows: int) -> None:
        self.kind, self.num_rows = kind, num_rows
        self.weights = [{name: random_weight(kind, *SHAPES[name]) for name in SHAPES} for _ in range(DISTINCT)]
        self.packed = [{name: each.in_fragments() for name, each in layer.items()} for layer in self.weights]
        hidden = SHAPES["qkv"][1]
        self.norm = Norm(torch.ones(hidden, device="cuda", dtype=BFLOAT), EPS)
        rows = torch.randn(num_rows, hidden, device="cuda", dtype=BFLOAT)
        self.x = Normed(rows, rows, rows.float().square().view(num_rows, -1, 16).sum(2).t().contiguous(), EPS)
        pages = CONTEXT // PAGE + 1
        self.cache = [torch.randn(pages, PAGE, KV_HEADS, DIM, device="cuda", dtype=BFLOAT) for _ in range(2)]
        self.page_table = torch.arange(pages, device="cuda", dtype=torch.int32)[None]
        self.positions = torch.arange(CONTEXT - num_rows, CONTEXT, device="cuda")
        self.cos_sin = torch.randn(CONTEXT, DIM, device="cuda")
        self.scratch = DecodeScratch.allocate(DIM, torch.device("cuda"))

    def run(self, variant: Variant, count: int = LAYERS) -> Tensor:
        """So many layers of a step."""
        x, stored = self.x, self.weights if variant.in_rows else self.packed
        for place in range(count):
            layer = stored[place % DISTINCT]
            qkv = self.launch(layer, "qkv", x, variant).values
            attended = decode_attention(
                qkv,
                self.cos_sin,
                self.positions,
                self.page_table,
                *self.cache,
                self.scratch,
                DIM**-0.5,
                read_before_wait=True,
            )
            middle = self.launch(layer, "output", attended, variant, Addition(x.values, self.norm))
            gates = self.launch(layer, "gate, up", middle, variant).values
            x = self.launch(layer, "down", gates, variant, Addition(middle.values, self.norm))
        return x.values

    def launch(
        self,
        layer: dict[str, QuantizedWeight],
        name: str,
        x: Tensor | Normed,
        variant: Variant,
        add: Addition | None = None,
    ) -> Normed:
        weight, gated = layer[name], name == "gate, up"
        cut: Cut | None = variant.cuts.get(name) or weight.cut(x.weighted if isinstance(x, Normed) else x, gated)
        assert cut is not None
        return weight.launch(cut, x, gated, add, BFLOAT)

    def variants(self) -> Iterator[Variant]:
        """All that are tried with these weights."""
        yield Variant("row order", in_rows=True)
        yield Variant("as chosen")
        for name, cut in self.other_cuts():
            yield Variant(f"{name}: {cut.warps} warps, {cut.tiles} tiles", cuts={name: cut})

    def other_cuts(self) -> Iterator[tuple[str, PackedStream]]:
        """Stages of two sizes, and half as many warps with twice as many columns each."""
        tiles = 4 if self.kind == "int4" else 2
        for name in SHAPES:
            weight, gated = self.packed[0][name], name == "gate, up"
            rows = 8 if self.num_rows <= 8 else 16
            x = torch.empty(self.num_rows, SHAPES[name][1], dtype=BFLOAT, device="cuda")
            for warps, share in ((8, 2 * tiles), (16, tiles), (16, tiles // 2)):
                cut = PackedStream(tiles=share, rows=rows, warps=warps)
                fits = fitted(cut, SHAPES[name][1], gated, weight.packing)
                if fits is not None and fits != weight.cut(x, gated):
                    yield name, fits


def random_weight(kind: str, size_n: int, size_k: int) -> QuantizedWeight:
    """In row order, of small values."""
    bits, group = FORMATS[kind]
    data = torch.randint(0, 256, (size_n, size_k), dtype=torch.uint8, device="cuda")
    data = data.where(data & 127 != 127, 8) if bits == 8 else packed(data & 15, PART)
    scales = torch.full((size_k // group if group else 1, size_n), 1e-5 if bits == 8 else 1e-3, device="cuda")
    return QuantizedWeight(data, Packing(scales.to(BFLOAT) if group else scales, None, bits, PART, group), BFLOAT)


def microseconds(run: Callable[[], object]) -> float:
    """Of a layer: the median of replays of a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(22):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / LAYERS)
    return round(statistics.median(times[2:]), 2)


def figures(kind: str, num_rows: int) -> Iterator[dict[str, Any]]:
    """Of all variants, in microseconds; each must compute what the others in its order do."""
    layers = Layers(kind, num_rows)
    variants = list(layers.variants())
    with compiling_together(PROCESSES) as compilations, compilations.finding():
        for variant in variants:
            layers.run(variant, 1)
    reading = sum(weight.num_bytes for weight in layers.packed[0].values()) / BANDWIDTH
    expected: Tensor | None = None
    for variant in variants:
        found = layers.run(variant).double()
        expected = found if expected is None else expected
        error = float((found - expected).norm() / expected.norm())
        us = microseconds(partial(layers.run, variant))
        figure = {"format": kind, "rows": num_rows, "variant": variant.name, "us": us, "error": round(error, 5)}
        print(
            f"{kind:5} {num_rows:3}  reads {1e6 * reading:6.2f}  {us:7.2f} us  {error:8.5f}  {variant.name}", flush=True
        )
        yield figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    arguments = parser.parse_args()
    cases = product(arguments.formats, arguments.rows)
    found = [figure for case in cases for figure in figures(*case)]
    if arguments.output:
        facts = describe_run(torch.cuda.get_device_name(), 1)
        write_report(arguments.output, {"benchmark": "quantized_layer", "run": facts, "figures": found})


if __name__ == "__main__":
    main()

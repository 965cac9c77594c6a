"""Times the experts of a few rows, cut up in several ways, beside the time to read their weights on an H200.

    python benchmarks/choose_experts.py --output FILE [--model glm-4.7-flash]        about 40 s on an H200
    python benchmarks/choose_experts.py --weights int4 --rows 8      in 8 bits (by block) or 4; of more rows than one

`tile_of` and `quantized_tile` (kernels/overlap_spec_kernels/experts) have what was best. A variant is a chain of layers
in one CUDA graph: both products, and the sum with a residual and its norm, of experts that take turns, so that none is
in the L2 cache. Tiles of the first product are tried, then those of the second, which has none for one row in 16 bits
(`sum_of_experts.py`). Every variant must have the bits of the first one.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_cases.benchmark import graph_us
from kernel_cases.expert_cases import Mixture
from overlap_spec_kernels import ExpertWeight, Norm, Normed, QuantizedStack, Routing, compiling_together, experts_add
from overlap_spec_kernels.experts import products, quantized_products
from overlap_spec_kernels.experts.products import Tile
from overlap_spec_kernels.linear.packing import Packing, part_of

from overlap_spec.bench.report import describe_run, write_report

BANDWIDTH = 4.23e12  # bytes/s
SIZES = {"qwen3-30b-a3b": Mixture(128, 8, 2048, 768), "glm-4.7-flash": Mixture(64, 4, 2048, 1536)}
# Columns, columns of K, warps, stages.
CUTS = [(columns, k, 4, stages) for columns in (16, 32, 64) for k in (64, 128, 256) for stages in (3, 4, 6, 8)]
CUTS += [(16, 128, 2, 6), (32, 128, 2, 4), (32, 128, 8, 4), (64, 128, 8, 3), (64, 64, 8, 6)]
# Of few bits the same, where columns are W's rows, of gate and up together.
NARROW_CUTS = [
    (columns, 128, warps, stages) for columns, warps in ((64, 4), (128, 4), (128, 8)) for stages in (2, 3, 4)
]
MOST_SHARED = 200 << 10  # bytes of a program
BITS = {"bf16": 16, "fp8": 8, "int4": 4}
GROUP = 128
STEPS = 6  # of several rows, with experts of their own


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)


def weight_of(experts: int, rows: int, columns: int, bits: int) -> ExpertWeight:
    """Random values; in few bits groups of 128 columns have a scale, in 8 bits of 128 rows too."""
    if bits == 16:
        return drawn(experts, rows, columns)
    per_scale, part = 128 if bits == 8 else 1, part_of(bits, GROUP, columns)
    assert part is not None
    data = torch.randint(0, 256, (experts, rows, columns * bits // 8), device="cuda", dtype=torch.uint8) & 0xF7
    scales = torch.rand(experts, columns // GROUP, -(-rows // per_scale), device="cuda") * 0.01
    return QuantizedStack(data, Packing(scales, None, bits, part, GROUP, per_scale))


class Layer:
    """One layer's experts, and rows that choose others each time."""

    def __init__(self, sizes: Mixture, bits: int, num_rows: int) -> None:
        experts, top_k, hidden, inner = sizes
        self.gate_up = weight_of(experts, 2 * inner, hidden, bits)
        self.down = weight_of(experts, hidden, inner, bits)
        self.x, self.residual, self.norm = drawn(num_rows, hidden), drawn(num_rows, hidden), Norm(drawn(hidden), 1e-6)
        chosen = torch.randperm(experts, device="cuda").view(-1, 1, top_k)
        if num_rows > 1:
            chosen = torch.rand(STEPS, num_rows, experts, device="cuda").topk(top_k, dim=2).indices
        weights = torch.full((num_rows, top_k), 1 / top_k, device="cuda")
        self.routings = [Routing(each.contiguous(), weights) for each in chosen]
        read = sum(len(each.unique()) for each in chosen) / len(chosen)
        self.num_bytes = read * 3 * hidden * inner * bits / 8

    def run(self, routing: Routing) -> Normed:
        return experts_add(self.x, self.gate_up, self.down, routing, self.residual, self.norm)


def fits(cut: tuple[int, int, int, int], gated: bool, bits: int) -> bool:
    columns, k, _, stages = cut
    weights = columns * (2 if gated and bits == 16 else 1) * bits // 8
    return stages * (2 * 16 + weights) * k <= MOST_SHARED


def variants(bits: int, num_rows: int) -> Iterator[tuple[str, tuple[int, int, int, int], dict[bool, Tile]]]:
    """What is chosen, the choice, and where it goes."""
    for gated in (True,) if bits == 16 and num_rows == 1 else (True, False):
        for cut in filter(partial(fits, gated=gated, bits=bits), CUTS if bits == 16 else NARROW_CUTS):
            columns, k, warps, stages = cut
            yield "gate, up" if gated else "down", cut, {gated: Tile(16, columns, k, warps, stages)}


def put(choice: dict[bool, Tile], bits: int) -> dict[bool, Tile]:
    """Make this choice. Returns the one before."""
    table = products._FEW if bits == 16 else quantized_products._FEW
    before = {gated: table[gated] for gated in choice}
    table.update(choice)
    return before


def measure(layer: Layer, bits: int, num_rows: int) -> Iterator[dict[str, Any]]:
    """A row for each variant, beside the best of what was chosen before it."""
    expected = [layer.run(routing).weighted for routing in layer.routings]
    best: dict[str, tuple[float, Any]] = {}
    for what, cut, choice in variants(bits, num_rows):
        before = put(choice, bits)
        calls = [partial(layer.run, routing) for routing in layer.routings]
        assert all(torch.equal(call().weighted, one) for call, one in zip(calls, expected, strict=True)), (what, cut)
        microseconds = min(graph_us(calls) for _ in range(2))
        yield {"what": what, "cut": cut, "us": round(microseconds, 2)}
        if microseconds < best.get(what, (float("inf"), None))[0]:
            best[what] = microseconds, cut
        else:
            put(before, bits)
    print(f"best: {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--model", choices=SIZES, default="qwen3-30b-a3b")
    parser.add_argument("--weights", choices=BITS, default="bf16")
    parser.add_argument("--rows", type=int, default=1)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/choose_experts.py: no CUDA device")
    torch.manual_seed(0)
    bits = BITS[arguments.weights]
    layer, rows = Layer(SIZES[arguments.model], bits, arguments.rows), []
    with compiling_together(14) as compilations, compilations.finding():
        for _, _, choice in variants(bits, arguments.rows):
            before = put(choice, bits)
            layer.run(layer.routings[0])
            put(before, bits)
    for row in measure(layer, bits, arguments.rows):
        share = layer.num_bytes / BANDWIDTH / (row["us"] * 1e-6)
        rows.append(row | {"share": round(share, 3)})
        print(f"{row['what']:9} {row['cut']!s:20} {row['us']:7.2f} us, {share:6.1%} of 4.23 TB/s", flush=True)
    if arguments.output:
        run = describe_run(torch.cuda.get_device_name(), torch.get_num_threads())
        write_report(arguments.output, {"benchmark": "choose_experts", "run": run, "rows": rows})


if __name__ == "__main__":
    main()

"""Times whole layers of an 8B model in 8 and 4 bits for batches of requests with four rows each: linears in one kernel.

    python benchmarks/quantized_batch_layer.py --output benchmarks/results/choosing/quantized_batch_layer_h200.json

As quantized_layer.py beside it, which has the layers, for more rows: every linear in its own kernel, or those between
two attentions in one, to the next layer's qkv or without it. `run_division` of packed_products.py chooses by this
table. It needs a Hopper GPU.
"""

import argparse
from collections.abc import Iterator
from itertools import product

import quantized_layer
import torch
from overlap_spec_kernels.linear.packed_products import PackedProducts, form_of
from overlap_spec_kernels.linear.packing import Packing
from quantized_layer import BFLOAT, CONTEXT, DIM, FORMATS, KV_HEADS, PAGE, Layers, Variant

from overlap_spec.bench.report import describe_run, write_report

WIDTH = 4  # rows of a request
ROWS = (12, 16, 32, 64, 128)


class Batch(Layers):
    """The layers of a step of several requests, whose keys lie in pages of their own."""

    def __init__(self, kind: str, num_rows: int) -> None:
        super().__init__(kind, num_rows)
        count, pages = num_rows // WIDTH, CONTEXT // PAGE + 1
        self.cache = [torch.randn(count * pages, PAGE, KV_HEADS, DIM, device="cuda", dtype=BFLOAT) for _ in range(2)]
        self.page_table = torch.arange(count * pages, device="cuda", dtype=torch.int32).view(count, pages)
        self.positions = torch.arange(CONTEXT - WIDTH, CONTEXT, device="cuda").repeat(count)

    def variants(self) -> Iterator[Variant]:
        """Each linear alone, then runs."""
        yield Variant("as chosen")
        yield from self.shallow()
        x = torch.empty(self.num_rows, self.packed[0]["output"].shape[1], dtype=BFLOAT, device="cuda")
        for name, reaches_qkv in (("run to qkv", True), ("run to down", False)):
            run = self.run_of(self.packed[0], self.packed[1], reaches_qkv, False)
            if cuts := run.cuts(x):
                yield Variant(name, run=cuts)
                yield Variant(f"{name}, looks ahead", run=cuts, looks_ahead=True)
            for other, divided in self.others(run.output.packing, len(run.weights)):
                yield Variant(f"{name}: {other}", run=divided)

    def others(self, packing: Packing, count: int) -> Iterator[tuple[str, tuple[PackedProducts, ...]]]:
        """Products of other widths, fewer parts of K."""
        forms = [form_of(packing, place == 1) for place in range(count)]
        known = [form for form in forms if form is not None]
        padded = next(rows for rows in (16, 32, 48, 64, 96, 128) if rows >= self.num_rows)
        ring = PackedProducts(padded, 1, 0).with_stages(*known)
        assert ring is not None
        if padded == 16:
            yield "products of 16 rows", parts_of(ring, (4, 1, 4, 2)[:count])
        yield "half as many parts", parts_of(ring, (2, 1, 2, 1)[:count])


def parts_of(ring: PackedProducts, parts: tuple[int, ...]) -> tuple[PackedProducts, ...]:
    """A division for each linear."""
    return tuple(ring._replace(splits=splits) for splits in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--only", default="", help="a part of the names of variants that are timed, beside the chosen")
    arguments = parser.parse_args()
    quantized_layer.Layers = Batch  # type: ignore[misc]
    cases = product(arguments.formats, arguments.rows)
    found = [figure for case in cases for figure in quantized_layer.figures(*case, arguments.only)]
    if arguments.output:
        facts = describe_run(torch.cuda.get_device_name(), 1)
        write_report(arguments.output, {"benchmark": "quantized_batch_layer", "run": facts, "figures": found})


if __name__ == "__main__":
    main()

"""Times attention of prompt chunks to keys in pages: the kernel in CUDA C++ in some divisions, Triton's, cuDNN's.

    python benchmarks/choose_chunks.py --output benchmarks/results/choosing/chunks_h200.json      about 30 s

`Cut` (kernels/overlap_spec_kernels/attention/paged_chunks.py) chooses by this table. A case is a captured step: one
chunk, and eight empty ones. cuDNN's needs gathered keys, which count. It needs a Hopper GPU.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from kernel_cases.graph_time import microseconds
from kernel_cases.inputs import HeadShape
from overlap_spec_kernels.attention.chunk_attention import chunk_attention
from overlap_spec_kernels.attention.paged_attention import _paged_attention_triton, attend_to_chunks
from overlap_spec_kernels.attention.paged_chunks import CUT, Chunks, Cut, Division
from torch import Tensor

from overlap_spec.bench.report import describe_run, write_report

LLAMA, SMOL = HeadShape(32, 8, 128), HeadShape(9, 3, 64)
PLACES = [(rows, start) for rows in (64, 128, 200, 256, 384, 512, 640, 1024) for start in (1024, 8192, 32768)]
LONG = [(rows, start) for rows in (1536, 2048, 4096, 8192) for start in (0, 8192, 49152)]
OTHERS = [(LLAMA, 128, 0), (LLAMA, 1024, 0), (SMOL, 256, 8192), (SMOL, 1024, 8192)]
CUTS = [CUT, Cut(1), *(Cut(2, Division(splits)) for splits in (1, 2, 4, 8))]
MOST_SPLIT = 1024  # rows; more fill the GPU many times
PAGE, REQUESTS, TABLE = 16, 9, 65536
LAUNCHES, ROUNDS = 8, 5
FAR = 2e-2  # of outputs near 0.01 to 1 in bfloat16


class Case(NamedTuple):
    """One chunk behind `start` keys."""

    heads: HeadShape
    rows: int
    start: int

    @property
    def flop(self) -> float:
        """Of the pairs of a row and a key that it sees."""
        keys = self.rows * self.start + self.rows * (self.rows + 1) / 2
        return 4.0 * self.heads.num_heads * self.heads.head_dim * keys

    def chunks(self) -> Chunks:
        """Random rows and pages."""
        num_pages = (self.start + self.rows) // PAGE + 2
        shape = (num_pages, PAGE, self.heads.num_kv_heads, self.heads.head_dim)
        cache = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
        table = torch.zeros(REQUESTS, TABLE // PAGE, dtype=torch.int32, device="cuda")
        table[0, : num_pages - 1] = torch.randperm(num_pages - 1, device="cuda").int() + 1
        starts = torch.tensor([0] + [self.rows] * REQUESTS, dtype=torch.int32, device="cuda")
        positions = torch.arange(self.start, self.start + self.rows, device="cuda")
        q = torch.randn(self.rows, self.heads.num_heads, self.heads.head_dim, device="cuda", dtype=torch.bfloat16)
        return Chunks(q, cache[0], cache[1], table, starts, positions, self.rows)


def figures(case: Case) -> dict[str, Any]:
    """Times of all ways, and whether their results are Triton's."""
    chunks, scale = case.chunks(), case.heads.head_dim**-0.5

    def by_triton() -> Tensor:
        return _paged_attention_triton(*chunks, scale)

    def timed(call: Callable[[], object]) -> float:
        return microseconds(lambda index: call(), LAUNCHES, ROUNDS)

    expected, found = by_triton(), {"triton": timed(by_triton)}
    wrong = []
    for cut in CUTS if case.rows <= MOST_SPLIT else (CUT, Cut(1)):
        splits = cut.division.num_splits if cut.division else "chosen"
        name = f"cluster {cut.cluster}, splits {splits}"
        if not (attend_to_chunks(chunks, scale, cut) - expected).abs().max() < FAR:
            wrong.append(name)
        found[name] = timed(lambda cut=cut: attend_to_chunks(chunks, scale, cut))
    if case.rows >= 512:
        found["cudnn"] = timed(
            lambda: chunk_attention(chunks.q, chunks.k_cache, chunks.v_cache, chunks.page_table[0], case.start, scale)
        )
    rates = {name: f"{us:.0f} us, {case.flop / us / 1e6:.0f} TFLOP/s" for name, us in found.items()}
    return {"heads": case.heads, "rows": case.rows, "start": case.start, "wrong": wrong, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    rows = []
    for case in [Case(LLAMA, *place) for place in PLACES + LONG] + [Case(*other) for other in OTHERS]:
        rows.append(figures(case))
        print(rows[-1], flush=True)
    if arguments.output:
        facts = describe_run(torch.cuda.get_device_name(), 1)
        write_report(arguments.output, {"benchmark": "choose_chunks", "run": facts, "figures": rows})


if __name__ == "__main__":
    main()

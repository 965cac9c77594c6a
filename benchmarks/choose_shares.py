"""Times decode attention of even and uneven batches, with programs divided equally and by the requests' lengths.

    python benchmarks/choose_shares.py --output benchmarks/results/choosing/shares_h200.json      about 30 s

`divide_keys` (kernels/overlap_spec_kernels/attention/decode_attention.py) chooses where a table is made by these times.
A row is one attention op in a CUDA graph of some: right after another; and after an ordinary launch, where nothing of
it overlaps with what is before (that launch's own time is taken off). Launches alternate between caches, so that keys
come from memory. `table_us` is what the table takes once a step, `programs` how many have something to do.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from kernel_cases.graph_time import microseconds
from kernel_cases.inputs import HeadShape
from overlap_spec_kernels.attention.decode_attention import DecodeScratch, decode_attention, divide_keys
from torch import Tensor

from overlap_spec.bench.report import describe_run, write_report

LLAMA, SMOL = HeadShape(32, 8, 128), HeadShape(9, 3, 64)
EVEN = {
    "8 x 300": [300] * 8,
    "16 x 300": [300] * 16,
    "32 x 1,000": [1000] * 32,
    "64 x 500": [500] * 64,
    "16 x 8,000": [8000] * 16,
    "64 x 500 +- 50%": [250 + 500 * index // 63 for index in range(64)],
}
UNEVEN = {
    "8 x 500, 40,000, 7 x 0": [500] * 8 + [40_000] + [0] * 7,
    "31 x 1,000, 32,000": [1000] * 31 + [32_000],
    "126 x 1,000, 2 x 60,000": [1000] * 126 + [60_000] * 2,
}
OF_SMOL = {name: lengths for name, lengths in EVEN.items() if max(lengths) <= 8192}
OF_SMOL["15 x 300, 8,000"] = [300] * 15 + [8000]
PAGE = 16
LONGEST = {LLAMA: 131_072, SMOL: 8192}  # places of a page table
POOL_BYTES = 1 << 28  # of the caches that launches alternate between, at least: far more than L2 holds
LAUNCHES, ROUNDS = 12, 7


class Batch(NamedTuple):
    """Arguments of a launch but for the caches; q, k and v are random."""

    qkv: Tensor
    cos_sin: Tensor
    positions: Tensor
    page_table: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    rows = []
    for row in all_rows():
        rows.append(row)
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        if arguments.output:
            facts = describe_run(torch.cuda.get_device_name(), 1)
            write_report(arguments.output, {"benchmark": "choose_shares", "run": facts, "figures": rows})


def all_rows() -> Iterator[dict[str, Any]]:
    for name, lengths in (EVEN | UNEVEN).items():
        for width in (1, 4):
            yield {"heads": "32/8 x 128", "width": width, "batch": name, **times(LLAMA, lengths, width)}
    for name, lengths in OF_SMOL.items():
        yield {"heads": "9/3 x 64", "width": 1, "batch": name, **times(SMOL, lengths, 1)}


def times(heads: HeadShape, lengths: list[int], width: int) -> dict[str, Any]:
    """Of both divisions."""
    caches, batch = drawn(heads, lengths, width)
    scratch = DecodeScratch.allocate(heads.head_dim, torch.device("cuda"))
    cached = torch.tensor(lengths, device="cuda")
    qkv, others, k_cache = batch.qkv.clone(), batch[1:], caches[0][0]

    def divide() -> Tensor | None:
        places = cached, batch.page_table, k_cache
        return divide_keys(*places, heads.num_heads, width, torch.bfloat16, scratch)

    def attend(index: int, shares: Tensor | None) -> Tensor:
        scale = heads.head_dim**-0.5
        places = (*others, *caches[index % len(caches)])
        return decode_attention(qkv, *places, scratch, scale, read_before_wait=True, shares=shares)

    def write(index: int) -> None:
        torch.add(batch.qkv, 0, out=qkv)

    found: dict[str, Any] = {"captured": len(lengths)}

    def timed(call: Callable[[int], object]) -> float:
        return round(microseconds(call, LAUNCHES, ROUNDS), 2)

    outputs, alone = [], timed(write)
    shares = divide()
    for name, table in ({"equal": None} | ({} if shares is None else {"by_length": shares})).items():
        outputs.append(attend(0, table))
        found[f"{name}_us"] = timed(lambda index, table=table: attend(index, table))
        both = timed(lambda index, table=table: (write(index), attend(index, table)))
        found[f"{name}_apart_us"] = round(both - alone, 2)
    if shares is not None:
        found["table_us"] = timed(lambda index: divide())
        programs = [int((shares & 65535 > 0).sum()), len(shares)]
        found |= {"programs": f"{programs[0]} of {programs[1]}", "most": int((shares & 65535).max())}
        found["far"] = round(float((outputs[0] - outputs[1]).abs().max()), 5)
    return found


def drawn(heads: HeadShape, lengths: list[int], width: int) -> tuple[list[tuple[Tensor, Tensor]], Batch]:
    """Random arguments on the GPU: caches of some layers, and the rest."""
    counts = [-(-(length + width) // PAGE) for length in lengths]
    shape = (sum(counts) + 1, PAGE, heads.num_kv_heads, heads.head_dim)
    size = sum(counts) * PAGE * heads.num_kv_heads * heads.head_dim * 4
    num_caches = min(max(POOL_BYTES // size, 2), LAUNCHES)
    caches = [tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv") for _ in range(num_caches)]
    table = torch.zeros(len(lengths), LONGEST[heads] // PAGE, dtype=torch.int32, device="cuda")
    pages = (torch.randperm(sum(counts), device="cuda").int() + 1).split(counts)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    columns = torch.arange(width, device="cuda")
    positions = (torch.tensor(lengths, device="cuda")[:, None] + columns).flatten()
    num_columns = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    qkv = torch.randn(len(positions), num_columns, device="cuda", dtype=torch.bfloat16)
    cos_sin = torch.randn(max(lengths) + width, heads.head_dim, device="cuda")
    return caches, Batch(qkv, cos_sin, positions, table)


if __name__ == "__main__":
    main()

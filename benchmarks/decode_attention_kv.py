"""Decode attention alone over KV pages of 16 and of 8 bits: microseconds a launch, and the share of copy bandwidth.

    python benchmarks/decode_attention_kv.py --output decode_attention_kv.json        about a minute on an H200
    python benchmarks/decode_attention_kv.py --batch-sizes 8,32 --contexts 1024,8192,32768 --variants triton --output ..

The heads are Llama-3.1-8B's, by default of one request; launches alternate between the caches of several layers, so
that none is in the L2 cache. Variants are what the op does not choose: other rings (warps, keys, stages), and the
Triton kernel.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from overlap_spec_kernels import DecodeScratch, decode_attention
from overlap_spec_kernels.attention.kv_format import KVScales
from torch import Tensor

from overlap_spec.bench.report import describe_run

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
CONTEXTS = (8192, 32768, 100_000)
WIDTHS = (1, 4)
FORMATS = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
POOL_BYTES = 1 << 29  # of the caches that launches alternate between: far more than L2 holds
LAUNCHES = 24
SCALES = KVScales(0.5, 2.0)
RINGS_TRIED = ((8, 16, 6), (8, 32, 2), (4, 16, 6), (4, 32, 3), (4, 64, 3), (8, 64, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--batch-sizes", type=numbers, default=(1,), help="requests of a launch, separated by commas")
    parser.add_argument("--contexts", type=numbers, default=CONTEXTS, help="tokens of each, separated by commas")
    parser.add_argument("--variants", choices=("rings", "triton"), nargs="*", default=(), help="also try these")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "decode_attention_kv", "run": describe_run("cuda", 1), "rows": []}
    sizes = itertools.product(arguments.contexts, arguments.batch_sizes, FORMATS)
    for row in itertools.chain.from_iterable(rows(*size, variants=arguments.variants) for size in sizes):
        report["rows"].append(row)
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        Path(arguments.output).write_text(json.dumps(report, indent=1) + "\n")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def rows(context: int, batch: int, name: str, variants: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Of every width and variant."""
    dtype = FORMATS[name]
    caches = make_caches(context, batch, dtype)
    for width in WIDTHS:
        for variant, choose in tried(name, variants).items():
            with_rings = saved_rings()
            choose()
            try:
                seconds = time_of(caches, context, batch, width)
            except Exception as error:  # a variant that needs more than there is
                print(f"{name} {variant}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            finally:
                restore(with_rings)
            num_bytes = 2 * batch * context * KV_HEADS * DIM * dtype.itemsize
            yield {
                "context": context,
                "batch": batch,
                "width": width,
                "kv": name,
                "variant": variant,
                "us": round(seconds * 1e6, 2),
                "TB/s": round(num_bytes / seconds / 1e12, 3),
            }
    del caches
    torch.cuda.empty_cache()


def tried(name: str, variants: Sequence[str]) -> dict[str, Callable[[], None]]:
    """Ways to choose a kernel, by name."""
    found: dict[str, Callable[[], None]] = {"as chosen": lambda: None}
    if name == "fp8_e4m3" and "rings" in variants:
        found |= {str(ring): ring_setter(ring) for ring in RINGS_TRIED}
    if name == "fp8_e4m3" and "triton" in variants:
        found["Triton kernel"] = no_rings
    return found


def make_caches(context: int, batch: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """K and V of some layers, of small normal values."""
    num_pages = batch * (-(-context // PAGE) + 8)
    size = (num_pages, PAGE, KV_HEADS, DIM)
    num_layers = max(POOL_BYTES // (2 * num_pages * PAGE * KV_HEADS * DIM * dtype.itemsize), 2)
    values = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    return [(values.to(dtype, copy=True), values.flip(0).to(dtype)) for _ in range(num_layers)]


def time_of(caches: list[tuple[Tensor, Tensor]], context: int, batch: int, width: int) -> float:
    """Seconds of a launch within a CUDA graph of many."""
    num_pages = caches[0][0].shape[0]
    qkv = torch.randn(batch * width, (HEADS + 2 * KV_HEADS) * DIM, device="cuda", dtype=torch.bfloat16)
    cos_sin = torch.randn(context + width, DIM, device="cuda")
    positions = torch.arange(context, context + width, device="cuda").repeat(batch)
    page_table = torch.randperm(num_pages, device="cuda").int().view(batch, -1)
    scratch = DecodeScratch.allocate(DIM, torch.device("cuda"))

    def launch(index: int) -> Tensor:
        k, v = caches[index % len(caches)]
        scales = KVScales() if k.dtype == torch.bfloat16 else SCALES
        return decode_attention(
            qkv, cos_sin, positions, page_table, k, v, scratch, DIM**-0.5, read_before_wait=True, scales=scales
        )

    for index in range(2):
        launch(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(LAUNCHES):
            launch(index)
    return min(_replayed(graph) for _ in range(8)) / LAUNCHES


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def _tables() -> list[dict[int, Any]]:
    import importlib

    op = importlib.import_module("overlap_spec_kernels.attention.decode_attention")
    return [op._RINGS_8BIT, op._DEEP_RINGS_8BIT]


def saved_rings() -> list[dict[int, Any]]:
    return [dict(table) for table in _tables()]


def restore(saved: list[dict[int, Any]]) -> None:
    for table, entries in zip(_tables(), saved, strict=True):
        table.clear()
        table.update(entries)


def ring_setter(ring: tuple[int, int, int]) -> Callable[[], None]:
    def choose() -> None:
        for table in _tables():
            table[DIM] = table[DIM]._replace(warps=ring[0], keys=ring[1], stages=ring[2], combined=2 * ring[0])

    return choose


def no_rings() -> None:
    for table in _tables():
        table.clear()


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s")

"""Calls of latent attention as a decode step makes them, of rows of 512 + 64 columns, and their checks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from overlap_spec_kernels.attention.kv_format import KVScales, stored
from overlap_spec_kernels.attention.latent_attention import (
    UNIT,
    LatentScratch,
    latent_attention,
    latent_attention_reference,
)
from overlap_spec_kernels.launch import ceil_div
from torch import Tensor

from kernel_cases.shapes import DTYPE, PAGE_SIZE, random_rows, size_of, widened
from kernel_cases.step_cases import Place, StepCase, case_of

RANK, ROPE = 512, 64
MODELS = {"GLM-4.7-Flash": 20, "DeepSeek-V2-Lite": 16, "DeepSeek-V3": 128}  # heads
FORMATS = {"bfloat16": DTYPE, "fp8_e4m3": torch.float8_e4m3fn}
SCALE = (RANK + ROPE) ** -0.5


class Work(NamedTuple):
    """Requests of one length, rows of each, and how their cache is kept."""

    batch: int
    context: int
    width: int = 1
    format: str = "bfloat16"

    def __str__(self) -> str:
        rows = "a row" if self.width == 1 else f"{self.width} rows"
        return f"{self.batch} x {rows} at {self.context}, {self.format}"


def latent_cases(model: str, works: tuple[Work, ...], place: Place, unit: int = UNIT) -> Iterator[StepCase]:
    """Bytes are those of all keys, which must be read once, and of queries and results. `unit`: of `LatentScratch`."""
    num_heads = MODELS[model]
    scratch = LatentScratch.allocate(num_heads, RANK, torch.device(place.device), unit=unit)
    for work in works:
        yield latent_case(num_heads, work, place, scratch)._replace(model=model)


def latent_case(num_heads: int, work: Work, place: Place, scratch: LatentScratch) -> StepCase:
    """Launches take turns with caches that the L2 cache cannot hold together."""
    device, num_pages = place.device, ceil_div(work.context, PAGE_SIZE)
    table = torch.randperm(work.batch * num_pages, dtype=torch.int32, device=device).view(work.batch, num_pages)
    positions = torch.arange(work.context - work.width, work.context, device=device).repeat(work.batch)
    q = random_rows(device, len(positions), num_heads, RANK + ROPE)
    scales = KVScales() if FORMATS[work.format] == DTYPE else KVScales(0.02, 0.02)
    cache = stored(random_rows(device, table.numel(), PAGE_SIZE, 1, RANK + ROPE), FORMATS[work.format], scales.k)
    num_bytes = work.batch * work.context * (RANK + ROPE) * cache.element_size() + size_of(q) * 2
    caches = [cache, *(cache.clone() for _ in range(place.copies(size_of(cache)) - 1))]
    inputs = [(q, each, RANK, table, None, positions, SCALE, scratch, None, scales) for each in caches]
    rows = work.batch * work.width
    return case_of(latent_attention, _reference, inputs, num_bytes, str(work), rows)


def _reference(*values: Any) -> Tensor:
    """In float32; a cache of 8 bits is widened without a rounding."""
    q, cache, rank, table, starts, positions, scale, _, window, scales = values
    rows = (widened(q), cache.float(), rank, table, starts, positions)
    return latent_attention_reference(*rows, scale, window, scales)

"""Routers for benchmarks: experts are drawn ahead, and what a step reads follows from a distribution, not from weights.

    uniform   each row's experts without replacement
    zipf      the same, expert n as often as 1 / (n + 1)
    shared    half of a row's experts are those of all rows of its request, the others are uniform

A router computes its logits as ever. Then its kernel adds so much to those of the drawn experts that they are chosen,
and chooses among all by the steps of the engine's own, so that it takes as long.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from overlap_spec_kernels import Routing
from overlap_spec_kernels.experts.route import (
    FEW_SOURCE,
    Common,
    Rows,
    add_common,
    chosen_by,
    logits_of_row,
    ranked,
    route_few,
    router_logits_reference,
    row_of_program,
    takes_few,
    with_common,
    written,
)
from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, runs_triton
from overlap_spec_kernels.nvrtc import CudaCode
from torch import Tensor

UNIFORM, ZIPF, SHARED = "uniform", "zipf", "shared"
# More than logits differ by, and little enough that probabilities of the others are not 0, as a router's are not: of
# equal ones `route_few` compares all.
BONUS = 60.0
STEPS = 64  # that have experts of their own; then they come again


class Drawn(ctypes.Structure):
    """`Drawn` of drawn_few.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "step", "last")),
        *(("steps", ctypes.c_int), ("most", ctypes.c_int), ("bonus", ctypes.c_float)),
    )


@functools.cache
def _few_code() -> CudaCode:
    """Of drawn_few.cu, which includes headers of the package."""
    paths = (FEW_SOURCE.with_name(name) for name in ("route_few.cuh", "route_rows.cuh"))
    headers = tuple((path.name, path.read_text()) for path in paths)
    return CudaCode(Path(__file__).with_name("drawn_few.cu"), headers=headers)


@dataclass(frozen=True, slots=True)
class InjectedChoice:
    """A `Choice` of experts that were drawn. `last`: what the rows of the last forward had."""

    top_k: int
    table: Tensor  # [STEPS, R, k] i32
    step: Tensor  # [1] i64: forwards so far
    last: Tensor  # [R, k] i64
    ends: bool  # of a model's last mixture: the next forward has other experts

    def __call__(self, x: Rows, weight: Tensor, common: Common | None = None) -> Routing:
        """Rows beyond R have the experts of other steps. Shapes: x [T, H], weight [E, H]. Sync: never on CUDA."""
        is_cuda = runs_triton(weight)
        routing = self._choose_triton(x, weight, common) if is_cuda else self._choose(written(x), weight, common)
        if self.ends:
            self.step.add_(1)
        return routing

    def _choose(self, x: Tensor, weight: Tensor, common: Common | None = None) -> Routing:
        logits = router_logits_reference(x, weight)
        rows, most = torch.arange(len(logits), device=logits.device), self.table.shape[1]
        drawn = self.table[(self.step + rows // most) % len(self.table), rows % most].long()
        moved = logits.scatter_add(1, drawn, torch.full_like(logits, BONUS)[:, : self.top_k])
        experts = moved.sort(dim=1, descending=True, stable=True).indices[:, : self.top_k].contiguous()
        self.last[: len(logits)].copy_(experts[:most])
        return with_common(Routing(experts, moved.gather(1, experts).softmax(1)), x, common)

    def _choose_triton(self, x: Rows, weight: Tensor, common: Common | None = None) -> Routing:
        if takes_few(x, len(weight), self.top_k):
            places = (each.data_ptr() for each in (self.table, self.step, self.last))
            drawn = Drawn(*places, len(self.table), self.table.shape[1], BONUS)
            return route_few(x, weight, self.top_k, True, common, moving=(_few_code(), drawn))
        return chosen_by(
            choose_drawn_kernel,
            x,
            weight,
            self.top_k,
            (self.table, self.step, self.last, self.table.shape[1]),
            common,
            STEPS=len(self.table),
            BONUS=BONUS,
        )


@TritonKernel.with_options(do_not_specialize=("num_rows", "common"))
def choose_drawn_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, partial_ptr: tl.tensor, x_stride: int, num_rows: int,
    squares_ptr: tl.tensor, rows_ptr: tl.tensor, eps: float, table_ptr: tl.tensor, step_ptr: tl.tensor,
    last_ptr: tl.tensor, most: int, experts_ptr: tl.tensor, weights_ptr: tl.tensor, share_ptr: tl.tensor, common: int,
    SIZE_K: tl.constexpr, EXPERTS: tl.constexpr, PARTS: tl.constexpr, SHARE: tl.constexpr, SQUARES: tl.constexpr,
    BLOCK_S: tl.constexpr, TOP_K: tl.constexpr, COMMON: tl.constexpr, EARLY: tl.constexpr, STEPS: tl.constexpr,
    BONUS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The largest logits of a row. `most`: rows of the table. Programs: see `row_of_program`."""
    row = row_of_program(
        x_ptr, weight_ptr, partial_ptr, x_stride, num_rows, squares_ptr, rows_ptr, eps, experts_ptr, SIZE_K, EXPERTS,
        PARTS, SHARE, SQUARES, BLOCK_S, EARLY, BLOCK_K, PDL,
    )  # fmt: skip
    if row >= 0:
        first = add_common(
            x_ptr, x_stride, row, num_rows, squares_ptr, eps, experts_ptr, weights_ptr, share_ptr, common, SIZE_K,
            TOP_K, COMMON, SQUARES, BLOCK_S,
        )  # fmt: skip
        expert = tl.arange(0, BLOCK)
        step = (tl.load(step_ptr) + row // most) % STEPS
        drawn: tl.tuple = ()
        for index in tl.static_range(TOP_K):
            drawn = drawn + (tl.load(table_ptr + (step * most + row % most) * TOP_K + index),)
        moved = logits_of_row(partial_ptr, row, num_rows, EXPERTS, PARTS, SHARE, BLOCK)
        for index in tl.static_range(TOP_K):
            moved += tl.where(expert == drawn[index], BONUS, 0.0)
        moved = tl.where(expert < EXPERTS, moved, float("-inf"))
        index, rank = ranked(moved, TOP_K, BLOCK)
        is_chosen = rank < TOP_K
        tl.store(experts_ptr + first + rank, index.to(tl.int64), mask=is_chosen)
        weights = tl.where(is_chosen, tl.exp(tl.gather(moved, index, 0) - tl.max(moved, axis=0)), 0.0)
        tl.store(last_ptr + row * TOP_K + rank, index.to(tl.int64), mask=is_chosen & (row < most))
        tl.store(weights_ptr + first + rank, weights / tl.sum(weights, axis=0), mask=is_chosen)


class Routers:
    """The choices of all layers of a model, and what they are drawn from."""

    def __init__(self, num_layers: int, num_experts: int, top_k: int, most_rows: int, place: torch.device) -> None:
        """`most_rows`: of a forward, with experts of their own."""
        self.num_experts, self.top_k, self.most_rows = num_experts, top_k, most_rows
        shape = (num_layers, STEPS, most_rows, top_k)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=place)
        self._last = torch.zeros((num_layers, most_rows, top_k), dtype=torch.int64, device=place)
        step = torch.zeros(1, dtype=torch.int64, device=place)
        self.choices = [
            InjectedChoice(top_k, self._tables[layer], step, self._last[layer], layer == num_layers - 1)
            for layer in range(num_layers)
        ]
        self.draw(UNIFORM, 1)

    def draw(self, kind: str, width: int) -> None:
        """Draw the experts of steps in which a request has `width` rows."""
        num_layers, steps, rows, _ = self._tables.shape
        requests = -(-rows // width)
        sizes = num_layers * steps * requests, width, self.num_experts, self.top_k
        by_step = experts_of(kind, *sizes, self._tables.device).view(num_layers, steps, requests * width, self.top_k)[
            :, :, :rows
        ]
        self._tables.copy_(by_step)

    def counted(self, num_rows: int) -> list[int]:
        """Distinct experts of the last forward, by layer. Sync: waits for it."""
        return [len(layer.unique()) for layer in self._last[:, :num_rows].cpu()]


def experts_of(kind: str, requests: int, width: int, num_experts: int, top_k: int, place: Any = "cpu") -> Tensor:
    """Draw the experts of each row of some requests, which are distinct. Shapes: -> [requests * width, k] i64."""
    rows = requests * width
    chances = torch.ones(num_experts, device=place)
    if kind == ZIPF:
        chances = 1 / torch.arange(1, num_experts + 1, device=place)
    if kind != SHARED:
        return _without_replacement(chances.expand(rows, -1), top_k)
    common = _without_replacement(chances.expand(requests, -1), top_k // 2).repeat_interleave(width, dim=0)
    own = _without_replacement(chances.repeat(rows, 1).scatter_(1, common, 0.0), top_k - top_k // 2)
    return torch.cat((common, own), dim=1)


def _without_replacement(chances: Tensor, count: int) -> Tensor:
    """By exponential races (Efraimidis and Spirakis 2006). Shapes: [rows, E] -> [rows, count] i64."""
    return (torch.rand(chances.shape, device=chances.device).log() / chances).topk(count, dim=1).indices


def expected_distinct(kind: str, requests: int, width: int, num_experts: int, top_k: int, draws: int = 2000) -> float:
    """Distinct experts of a step: in closed form, or of Zipf's law the mean of steps that are drawn for this."""
    if kind == UNIFORM:
        return num_experts * (1 - (1 - top_k / num_experts) ** (requests * width))
    if kind == SHARED:
        common, own = top_k // 2, top_k - top_k // 2
        others = num_experts - common
        of_request = common + others * (1 - (1 - own / others) ** width)
        return num_experts * (1 - (1 - of_request / num_experts) ** requests)
    drawn = experts_of(kind, draws * requests, width, num_experts, top_k).view(draws, -1)
    hit = torch.zeros(draws, num_experts).scatter_(1, drawn, 1.0)
    return float(hit.sum() / draws)

"""Calls of the ops of any forward, prefill included: timed one by one, with a cold L2 cache."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from overlap_spec_kernels.attention.paged_attention import paged_attention, paged_attention_reference
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write, rope_kv_write_reference
from overlap_spec_kernels.norm.add_rms_norm import add_rms_norm, add_rms_norm_reference
from overlap_spec_kernels.norm.rms_norm import rms_norm, rms_norm_reference
from overlap_spec_kernels.norm.silu_mul import silu_mul, silu_mul_reference
from torch import Tensor

from kernel_cases.inputs import HeadShape, attention_inputs, rope_inputs, to_device
from kernel_cases.shapes import (
    DTYPE,
    EPS,
    MODELS,
    PAGE_SIZE,
    Shape,
    assert_alike,
    random_rows,
    size_of,
    widened,
)

NUM_ROWS = (4, 256, 2048)  # one window, 64 windows, a prompt chunk
# (first position, rows) of each request
ATTENTION: dict[str, list[tuple[int, int]]] = {
    "verify 1 x 4 rows at 500": [(500, 4)],
    "verify 1 x 4 rows at 32k": [(32768, 4)],
    "verify 64 x 4 rows at 2k": [(2048, 4)] * 64,
    "decode 64 x 1 row at 2k": [(2048, 1)] * 64,
    "prefill 2048 rows": [(0, 2048)],
    "prefill 512 rows at 8k": [(8192, 512)],
}


class Case(NamedTuple):
    """One timed call. `check` raises AssertionError where the kernel and the reference differ."""

    op: str
    model: str
    workload: str
    num_bytes: int
    call: Callable[[], object]
    check: Callable[[], None]


def layer_cases() -> Iterator[Case]:
    """Every op on every model and workload."""
    for model, shape in MODELS.items():
        for num_rows in NUM_ROWS:
            yield from row_cases(model, shape, num_rows)
            yield rope_case(model, shape.heads, num_rows)
        for workload, requests in ATTENTION.items():
            yield attention_case(model, shape.heads, workload, requests)


def row_cases(model: str, shape: Shape, num_rows: int) -> Iterator[Case]:
    """The ops that work row by row."""
    x, residual = (random_rows("cuda", num_rows, shape.hidden) for _ in range(2))
    weight = random_rows("cuda", shape.hidden)
    gate_up = random_rows("cuda", num_rows, 2 * shape.intermediate)
    ops: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], int]] = [
        (rms_norm, rms_norm_reference, (x, weight, EPS), 2 * size_of(x) + size_of(weight)),
        (add_rms_norm, add_rms_norm_reference, (x, residual, weight, EPS), 4 * size_of(x) + size_of(weight)),
        (silu_mul, silu_mul_reference, (gate_up,), size_of(gate_up) * 3 // 2),
    ]
    for op, reference, inputs, num_bytes in ops:
        yield case_of(op, reference, inputs, num_bytes, model, f"{num_rows} rows")


def rope_case(model: str, heads: HeadShape, num_rows: int) -> Case:
    """Rotation of q and k, and the write of k and v."""
    inputs = tuple(to_device(value, "cuda") for value in rope_inputs(heads, num_rows, PAGE_SIZE, DTYPE))
    q, k, v, *_ = inputs
    angles = num_rows * heads.head_dim * 4
    num_bytes = 2 * (size_of(q) + size_of(k) + size_of(v)) + angles
    return case_of(rope_kv_write, rope_kv_write_reference, inputs, num_bytes, model, f"{num_rows} rows")


def attention_case(model: str, heads: HeadShape, workload: str, requests: list[tuple[int, int]]) -> Case:
    """Attention of (first position, rows) requests."""
    inputs = attention_inputs(heads, requests, PAGE_SIZE, DTYPE)
    num_keys = sum(first + rows for first, rows in requests)
    kv_bytes = 2 * num_keys * heads.num_kv_heads * heads.head_dim * inputs.q.element_size()
    arguments = tuple(to_device(value, "cuda") for value in inputs)

    def reference(*values: Any) -> Tensor:
        q, k_cache, v_cache, page_table, row_starts, positions, _, scale, _ = values
        return paged_attention_reference(q, k_cache, v_cache, page_table, row_starts, positions, scale)

    return case_of(paged_attention, reference, arguments, 2 * size_of(inputs.q) + kv_bytes, model, workload)


def case_of(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: tuple[Any, ...],
    num_bytes: int,
    model: str,
    workload: str,
) -> Case:
    """Bind an op and the check against its reference, which runs in float32 on the same values."""

    def check() -> None:
        expected = reference(*(widened(value) for value in inputs))
        assert_alike(op(*inputs), expected)

    return Case(op.__name__, model, workload, num_bytes, lambda: op(*inputs), check)

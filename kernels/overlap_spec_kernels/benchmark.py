"""Times every op on one GPU: `python -m overlap_spec_kernels.benchmark --output FILE`.

Not here: the steps of an engine. Each op is compared with its twin first, then timed with a cold L2 cache (median).
Bytes are those that must move once; the ceiling is a device copy measured in the same run.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels._inputs import HeadShape, attention_inputs, rope_inputs, to_device
from overlap_spec_kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from overlap_spec_kernels.paged_attention import paged_attention, paged_attention_reference
from overlap_spec_kernels.rms_norm import rms_norm, rms_norm_reference
from overlap_spec_kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference
from overlap_spec_kernels.silu_mul import silu_mul, silu_mul_reference

DTYPE = torch.bfloat16
TOLERANCE = 2**-6  # relative and absolute, of bfloat16 against the twin in float32
EPS = 1e-5
PAGE_SIZE = 16
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


class Shape(NamedTuple):
    """Widths of a model's layers."""

    hidden: int
    intermediate: int
    heads: HeadShape


MODELS = {
    "SmolLM2-135M": Shape(576, 1536, HeadShape(9, 3, 64)),
    "Llama-3.1-8B": Shape(4096, 14336, HeadShape(32, 8, 128)),
}


class Case(NamedTuple):
    """One timed call. `check` raises AssertionError where the kernel and the twin differ."""

    op: str
    model: str
    workload: str
    num_bytes: int
    call: Callable[[], object]
    check: Callable[[], None]


@dataclass(frozen=True)
class Measurement:
    """One row of the report. `share` is of the copy ceiling."""

    op: str
    model: str
    workload: str
    num_bytes: int
    time_us: float
    gb_per_s: float
    share: float


def main() -> None:
    """Measure, print a table, write the report."""
    parser = argparse.ArgumentParser(prog="overlap_spec_kernels.benchmark", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", default="", help="recorded in the report")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("overlap_spec_kernels.benchmark: no CUDA device")
    report = run(arguments.commit)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def run(commit: str) -> dict[str, Any]:
    """Check and time every case. Raises: AssertionError where a kernel disagrees with its twin."""
    import triton

    torch.manual_seed(0)
    ceiling = copy_bandwidth()
    measurements = []
    for case in all_cases():
        case.check()
        measurement = measure(case, ceiling)
        print(f"{case.op:16} {case.model:13} {case.workload:26} {measurement.time_us:9.1f} us", end=" ")
        print(f"{measurement.gb_per_s:7.0f} GB/s {measurement.share:6.1%}", flush=True)
        measurements.append(asdict(measurement))
    return {
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "commit": commit,
        "command": "python -m overlap_spec_kernels.benchmark",
        "dtype": str(DTYPE).removeprefix("torch."),
        "page_size": PAGE_SIZE,
        "copy_gb_per_s": ceiling,
        "measurements": measurements,
    }


def measure(case: Case, ceiling: float) -> Measurement:
    """Check the op against its twin, then time it."""
    time_ms = median_ms(case.call)
    gb_per_s = case.num_bytes / time_ms / 1e6
    return Measurement(*case[:4], time_us=time_ms * 1e3, gb_per_s=gb_per_s, share=gb_per_s / ceiling)


def median_ms(call: Callable[[], object]) -> float:
    """Median time of a call, in ms, with a cold L2 cache."""
    from triton.testing import do_bench

    return float(do_bench(call, return_mode="median"))


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy, bytes read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source)) / 1e6


def all_cases() -> Iterator[Case]:
    """Every op on every model and workload."""
    for model, shape in MODELS.items():
        for num_rows in NUM_ROWS:
            yield from row_cases(model, shape, num_rows)
            yield rope_case(model, shape.heads, num_rows)
        for workload, requests in ATTENTION.items():
            yield attention_case(model, shape.heads, workload, requests)


def row_cases(model: str, shape: Shape, num_rows: int) -> Iterator[Case]:
    """The ops that work row by row."""
    x, residual = (torch.randn(num_rows, shape.hidden, dtype=DTYPE, device="cuda") for _ in range(2))
    weight = torch.randn(shape.hidden, dtype=DTYPE, device="cuda")
    gate_up = torch.randn(num_rows, 2 * shape.intermediate, dtype=DTYPE, device="cuda")
    ops: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], int]] = [
        (rms_norm, rms_norm_reference, (x, weight, EPS), 2 * size_of(x) + size_of(weight)),
        (add_rms_norm, add_rms_norm_reference, (x, residual, weight, EPS), 4 * size_of(x) + size_of(weight)),
        (silu_mul, silu_mul_reference, (gate_up,), size_of(gate_up) * 3 // 2),
    ]
    for op, twin, inputs, num_bytes in ops:
        yield case_of(op, twin, inputs, num_bytes, model, f"{num_rows} rows")


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

    def twin(*values: Any) -> Tensor:
        q, k_cache, v_cache, page_table, row_starts, positions, _, scale, _ = values
        return paged_attention_reference(q, k_cache, v_cache, page_table, row_starts, positions, scale)

    return case_of(paged_attention, twin, arguments, 2 * size_of(inputs.q) + kv_bytes, model, workload)


def case_of(
    op: Callable[..., Any],
    twin: Callable[..., Any],
    inputs: tuple[Any, ...],
    num_bytes: int,
    model: str,
    workload: str,
) -> Case:
    """Bind an op and the check against its twin, which runs in float32 on the same values."""

    def check() -> None:
        expected = twin(*(widened(value) for value in inputs))
        actual = op(*inputs)
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, check_dtype=False)

    return Case(op.__name__, model, workload, num_bytes, lambda: op(*inputs), check)


def widened(value: Any) -> Any:
    """A 16-bit tensor as float32, to compare with; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype == DTYPE else value


def size_of(tensor: object) -> int:
    """Bytes of a tensor."""
    assert isinstance(tensor, Tensor)
    return tensor.numel() * tensor.element_size()


if __name__ == "__main__":
    main()

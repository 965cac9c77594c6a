"""Weights in 8 and 4 bits: packing, references, and the kernel of few rows, interpreted, against float64 products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from overlap_spec_kernels import Norm, Normed, fused_linear, linear_add, linear_argmax, linear_logits
from overlap_spec_kernels.linear import quantized_stream
from overlap_spec_kernels.linear.packing import dequantised, packed, unpacked
from support.quantized_cases import Case, matrix_of, weight_of
from torch import Tensor

if TYPE_CHECKING:
    from emulators.gluon.launch import Hopper

BFLOAT, F64 = torch.bfloat16, torch.float64
STREAM, TILED = "_quantized_stream_kernel", "_quantized_tiles_kernel"


CASES = {
    "fp8, rows": Case(3, 60, 1024, 8),
    "fp8, rows, K of 64s, 9 rows": Case(9, 40, 576, 8),
    "fp8, tiles": Case(17, 200, 512, 8),
    "fp8, tiles, 128 rows": Case(100, 330, 256, 8),
    "fp8, blocks": Case(5, 256, 1280, 8, 128, 128),
    "fp8, groups": Case(1, 32, 384, 8, 128),
    "int4": Case(2, 96, 1152, 4, 128, scales=BFLOAT),
    "int4 with zero points": Case(4, 64, 512, 4, 128, has_zeros=True, scales=torch.float16),
    "int4, groups of 64": Case(20, 96, 640, 4, 64, has_zeros=True, scales=BFLOAT),
    "int4, groups of 32": Case(8, 32, 576, 4, 32, has_zeros=True, scales=torch.float16),
    "int4, groups of 64, symmetric": Case(33, 32, 256, 4, 64, scales=BFLOAT),
}


def kernel_of(name: str) -> str:
    return TILED if "tiles" in name else STREAM


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(BFLOAT)


def test_two_values_share_a_byte() -> None:
    values = torch.randint(0, 16, (3, 256), dtype=torch.uint8)
    data = packed(values, 128)
    assert data.shape == (3, 128) and torch.equal(unpacked(data, 128), values)
    assert data[1, 5] == values[1, 5] + 16 * values[1, 69] and data[2, 64] == values[2, 128] + 16 * values[2, 192]


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("name", CASES)
def test_the_reference(name: str) -> None:
    weight = weight_of(CASES[name], F64)
    matrix, x = matrix_of(weight), torch.randn(3, weight.shape[1], dtype=F64)
    torch.testing.assert_close(dequantised(weight.data, weight.packing, F64), matrix, rtol=1e-12, atol=1e-12)
    expected = x @ matrix.t()
    torch.testing.assert_close(fused_linear(x, weight), expected)
    torch.testing.assert_close(linear_logits(x, weight), expected)
    assert torch.equal(linear_argmax(x, weight), expected.argmax(1))
    gate, up = expected.chunk(2, dim=1)
    torch.testing.assert_close(fused_linear(x, weight, gated=True), F.silu(gate) * up)
    residual, norm = torch.randn(3, weight.shape[0], dtype=F64), Norm(torch.rand(weight.shape[0], dtype=F64), 1e-5)
    torch.testing.assert_close(linear_add(x, weight, residual, norm).values, residual + expected)
    for ids in (slice(7, 20), torch.tensor([30, 2, 2])):
        torch.testing.assert_close(fused_linear(x, weight.rows(ids)), expected[:, ids])


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("name", CASES)
def test_the_kernels(gpu: Hopper, name: str) -> None:
    """Rows on their way into a norm, whose sums of squares come in 40 parts."""
    case = CASES[name]
    weight, rows = weight_of(case), drawn(case.rows, case.size_k)
    parts = rows.double().square().sum(1) * torch.randn(40, 1).softmax(0)
    scale = torch.rsqrt(rows.double().square().mean(1, keepdim=True) + 0.1)
    expected = rows.double() * scale @ matrix_of(weight).t()
    x = Normed(rows, rows, parts.float(), 0.1)
    logits = linear_logits(x, weight)
    assert logits.dtype == torch.float32 and gpu.launches[-1].kernel == kernel_of(name)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    assert_close(fused_linear(x, weight), expected)
    gate, up = expected.chunk(2, dim=1)
    assert_close(fused_linear(x, weight, gated=True), F.silu(gate) * up)
    assert gpu.kernels == [kernel_of(name)] * 3


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("name", ["fp8, rows", "fp8, tiles", "fp8, blocks", "int4 with zero points"])
def test_addition(gpu: Hopper, name: str) -> None:
    case = CASES[name]
    weight, x = weight_of(case), drawn(case.rows, case.size_k)
    residual = drawn(case.rows, 2 * case.size_n)[:, : case.size_n]
    norm = Norm(drawn(case.size_n, scale=0.1) + 1, 0.1)
    found = linear_add(x, weight, residual, norm)
    assert gpu.kernels == [kernel_of(name)]
    assert_close(found.values, residual.double() + x.double() @ matrix_of(weight).t())
    assert_close(found.normalised(), F.rms_norm(found.values.double(), (case.size_n,), norm.weight.double(), norm.eps))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=2**-6, atol=2**-6)


STREAMED = {
    "SIZE_K": 4096, "SCALED": True, "GATED": False, "ADD": False, "BITS": 8, "SCALES": 0, "SCALE_ROWS": 1,
    "ZEROS": False, "PDL": True, "ROWS": 8, "BLOCK_N": 16, "PART": 128, "WARPS_K": 4, "WARPS_N": 1, "RUNS": 1,
    "STAGES": 4, "BLOCK_U": 64,
}  # fmt: skip
COMPILED = {
    "fp8, gates": STREAMED | {"GATED": True},
    "fp8, blocks": STREAMED | {"SCALES": 1, "SCALE_ROWS": 128},
    "fp8, blocks, 64 rows": STREAMED
    | {"SCALES": 1, "SCALE_ROWS": 128, "ROWS": 32, "BLOCK_N": 64, "WARPS_K": 2, "WARPS_N": 4, "STAGES": 2},
    "int4 with zero points": STREAMED | {"BITS": 4, "SCALES": 1, "ZEROS": True, "ADD": True},
}


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_for_hopper(name: str) -> None:
    """On tensor cores, without a layout change through shared memory, in as few copies as 16 bytes each allow."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    constants, function = COMPILED[name], quantized_stream._quantized_stream_kernel.compiled
    kinds = {"weight_ptr": "*u8", "squares_ptr": "*fp32", "sums_ptr": "*fp32", "scales_ptr": "*fp32", "eps": "fp32"}
    others = {key: "*bf16" if key.endswith("_ptr") else "i32" for key in function.arg_names}
    signature = others | kinds | dict.fromkeys(constants, "constexpr")
    places = {key: (index,) for index, key in enumerate(function.arg_names)}
    attrs = {places[key]: [["tt.divisibility", 16]] for key in others if signature[key] != "fp32" and "num" not in key}
    source = GluonASTSource(
        function,
        {key: signature[key] for key in function.arg_names},
        constexprs={places[key]: value for key, value in constants.items()},
        attrs={place: value for place, value in attrs.items() if function.arg_names[place[0]] not in constants},
    )
    options = {"num_warps": COMPILED[name]["WARPS_K"] * COMPILED[name]["WARPS_N"]}
    ptx = compiled(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "mma.sync" in ptx and "ldmatrix" in ptx and ".local" not in ptx
    assert ptx.count("griddepcontrol.wait") == 1

"""Int8 weights through the ops that dense ones take, on a CPU; refused arguments."""

import pytest
import torch
import torch.nn.functional as F
from overlap_spec_kernels import (
    LinearOperand,
    Norm,
    Normed,
    fused_linear,
    linear_add,
    linear_argmax,
    linear_logits,
)
from support import int8_weight
from support.int8_weight import Int8Weight

F64 = torch.float64
VALUES = torch.randint(-127, 128, (6, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
SCALES = torch.linspace(0.01, 0.02, 6, dtype=F64)
WEIGHT = Int8Weight(VALUES, SCALES, F64)
DENSE = VALUES * SCALES[:, None]


def test_each_op_multiplies_by_the_scaled_values() -> None:
    x, residual = torch.randn(3, 8, dtype=F64), torch.randn(3, 6, dtype=F64)
    norm, expected = Norm(torch.rand(6, dtype=F64) + 0.5, 1e-5), x @ DENSE.t()
    torch.testing.assert_close(fused_linear(x, WEIGHT), expected)
    torch.testing.assert_close(linear_logits(x, WEIGHT), expected)
    torch.testing.assert_close(fused_linear(x, WEIGHT, gated=True), F.silu(expected[:, :3]) * expected[:, 3:])
    total = linear_add(x, WEIGHT, residual, norm)
    torch.testing.assert_close(total.values, residual + expected)
    torch.testing.assert_close(total.normalised(), F.rms_norm(total.values, (6,), norm.weight, norm.eps))
    assert torch.equal(linear_argmax(x, WEIGHT), expected.argmax(1))
    ids = torch.arange(60, 0, -10)
    assert torch.equal(linear_argmax(x, WEIGHT, ids), ids[expected.argmax(1)])


def test_a_norm_in_parts_is_finished_first() -> None:
    values = torch.randn(3, 8, dtype=F64)
    whole = F.rms_norm(values, (8,), torch.full((8,), 0.7, dtype=F64), 1e-5)
    parts = Normed(values, values * 0.7, values.square().view(3, 2, 4).sum(2).t(), 1e-5)
    torch.testing.assert_close(fused_linear(parts, WEIGHT), whole @ DENSE.t())


def test_logits_of_16_bit_rows_are_float32() -> None:
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), Int8Weight(VALUES, SCALES.float(), torch.bfloat16)
    logits = linear_logits(x, weight)
    torch.testing.assert_close(logits, x.float() @ DENSE.float().t())
    assert torch.equal(fused_linear(x, weight), logits.bfloat16())


@pytest.mark.parametrize(
    ("argument", "x", "weight"),
    [
        ("x", torch.randn(8, dtype=F64), WEIGHT),
        ("weight", torch.randn(3, 9, dtype=F64), WEIGHT),
        ("weight", torch.randn(3, 8), WEIGHT),
        ("weight", torch.randn(3, 8, dtype=F64), Int8Weight(VALUES.short(), SCALES, F64)),
        ("weight", torch.randn(3, 8, dtype=F64), Int8Weight(VALUES, SCALES[:5], F64)),
    ],
)
def test_refused_arguments_are_named(argument: str, x: torch.Tensor, weight: LinearOperand) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        fused_linear(x, weight)


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_it_compiles_for_hopper(kind: str, block_m: int) -> None:
    """On tensor cores, but for float32, which is not multiplied as TF32; no GPU is needed."""
    triton = pytest.importorskip("triton", reason="Triton's wheels are for Linux: pip install triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = int8_weight._int8_linear_kernel.compiled
    constants = {"SIZE_K": 576, "PDL": True, "BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": 64}
    pointers = {"x_ptr": f"*{kind}", "values_ptr": "*i8", "scales_ptr": "*fp32", "out_ptr": f"*{kind}"}
    signature = {name: pointers.get(name, "i32") for name in function.arg_names} | dict.fromkeys(constants, "constexpr")
    by_place = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, by_place)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert ptx.count("griddepcontrol.wait") == 1 and ".local" not in ptx
    assert ("mma" in ptx) == (kind != "fp32")

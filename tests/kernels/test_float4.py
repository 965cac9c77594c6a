"""Matrices of 4-bit floats: their layout, their reference, what they refuse, and that their kernel compiles."""

import re
from typing import Any

import pytest
import torch
from overlap_spec_kernels import Float4Matrices, Float4Weight, fused_linear, linear_logits
from overlap_spec_kernels.linear import float4
from support.float4_weights import FORMATS, meaning_of, random_float4

F64 = torch.float64


@pytest.mark.parametrize("group", FORMATS)
@pytest.mark.parametrize(("shape", "parts"), [((70, 320), 1), ((64, 128), 2), ((12, 32), 2), ((130, 96), 1)])
def test_what_is_packed_is_kept(shape: tuple[int, int], parts: int, group: int) -> None:
    stored = random_float4(*shape, group)
    packed = Float4Matrices.packed(*stored, parts, F64)
    values, scales = packed.values(0)
    assert torch.equal(values, stored[0]) and torch.equal(scales, stored[1])
    assert packed.shape == (1, *shape) and packed.parts == parts
    assert torch.equal(packed.matrix(0, F64), meaning_of(*stored))


def test_one_factor_of_all_rows_has_a_place_for_each() -> None:
    """A kernel reads the factor of row n at place n: an expanded tensor has one place, and others lie behind it."""
    values, scales, _ = random_float4(70, 96, 16)
    packed = Float4Matrices.packed(values, scales, torch.tensor(0.5).expand(70), 1, F64)
    assert packed.fits and packed.factors is not None and packed.factors.untyped_storage().nbytes() == 70 * 4


@pytest.mark.parametrize("group", FORMATS)
def test_every_value_and_every_scale_to_the_bit(group: int) -> None:
    """In float32 too: nothing is rounded but by the factor."""
    scales = torch.arange(254 if group == 32 else 127, dtype=torch.uint8)[:, None]
    values = torch.arange(16, dtype=torch.uint8).repeat(len(scales), group // 16)
    for dtype in (torch.float32, F64):
        found = Float4Matrices.packed(values, scales, None if group == 32 else torch.ones(127), 1, F64).matrix(0, dtype)
        expected = meaning_of(values, scales, None)
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("group", FORMATS)
def test_matrices_of_all_experts(group: int) -> None:
    stored = [random_float4(128, 64, group, seed=seed) for seed in range(3)]
    whole = Float4Matrices.stacked([Float4Matrices.packed(*each, 2, F64) for each in stored])
    assert whole.shape == (3, 128, 64)
    for index, each in enumerate(stored):
        assert torch.equal(whole.matrix(index, F64), meaning_of(*each))
    meta = [tuple(None if part is None else part.to("meta") for part in each) for each in stored]
    outlined = Float4Matrices.stacked([Float4Matrices.packed(*each, 2, F64) for each in meta])
    assert outlined.num_bytes == whole.num_bytes and outlined.words.shape == whole.words.shape


@pytest.mark.parametrize("group", FORMATS)
def test_a_linear_is_its_matrix(group: int) -> None:
    stored = random_float4(70, 96, group)
    weight, x = Float4Weight(Float4Matrices.packed(*stored, 1, F64)), torch.randn(5, 96, dtype=F64)
    expected = x @ meaning_of(*stored).t()
    torch.testing.assert_close(fused_linear(x, weight), expected)
    torch.testing.assert_close(linear_logits(x, weight), expected)
    torch.testing.assert_close(fused_linear(x, weight.rows(torch.tensor([3, 69, 3]))), expected[:, [3, 69, 3]])
    torch.testing.assert_close(fused_linear(x, weight.rows(slice(2, 40))), expected[:, 2:40])


def test_its_bytes_are_those_of_4_bits_and_of_scales() -> None:
    for group, expected in {32: 4 + 8 / 32, 16: 4 + 8 / 16}.items():
        packed = Float4Matrices.packed(*random_float4(512, 1024, group), 2, torch.bfloat16)
        of_factors = 0 if packed.factors is None else packed.factors.nbytes
        assert 8 * (packed.num_bytes - of_factors) / (512 * 1024) == expected


def test_arguments_that_do_not_fit() -> None:
    weight = Float4Weight(Float4Matrices.packed(*random_float4(64, 96, 32), 1, torch.float32))
    for x in (torch.randn(2, 64), torch.randn(2, 96, dtype=torch.float16)):
        with pytest.raises(ValueError, match="weight: expected"):
            fused_linear(x, weight)


CONSTANTS: dict[str, Any] = {"SIZE_K": 2880, "GROUP": 32, "FACTORS": False, "UNIT": 126, "PDL": True}
CONSTANTS |= {"BLOCK_M": 16, "BLOCK_N": 32}
MANY = {"BLOCK_M": 32, "BLOCK_N": 64}
NAMES = {"*bf16": "bf16.bf16", "*fp16": "f16.f16"}
NVFP4 = {"GROUP": 16, "FACTORS": True, "SIZE_K": 4096}
COMPILED = [(changes, "*bf16", 90) for changes in ({}, MANY, NVFP4, NVFP4 | MANY, {"BLOCK_N": 16})]
COMPILED += [(MANY | {"UNIT": 14}, "*fp16", 90), (NVFP4, "*fp32", 90), (NVFP4 | {"PDL": False}, "*bf16", 80)]


@pytest.mark.slow_but_every(10)
@pytest.mark.parametrize(("changes", "dtype", "capability"), COMPILED, ids=str)
def test_the_kernel_compiles_without_spills(changes: dict[str, Any], dtype: str, capability: int) -> None:
    """In 16 bits all tiles have one instruction, whose columns are in one order: no operand is loaded wider."""
    triton = pytest.importorskip("triton", reason="its wheels are for Linux: pip install triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants, function = CONSTANTS | changes, float4._float4_linear_kernel.compiled
    types = {"words_ptr": "*i32", "scales_ptr": "*i32", "factors_ptr": "*fp32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, dtype if name.endswith("_ptr") else "i32")
        for name in function.arg_names
    }
    by_place = {(function.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": min(constants["BLOCK_N"] // 8, 4), "num_stages": 4 if dtype != "*fp32" else 2}
    source = ASTSource(function, signature, by_place)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
    assert ".local" not in code["ptx"] and "wgmma" not in code["ptx"]
    if dtype != "*fp32":
        assert set(re.findall(r"mma\.sync\S*", code["ptx"])) == {
            f"mma.sync.aligned.m16n8k16.row.col.f32.{NAMES[dtype]}.f32"
        }
        assert set(re.findall(r"kWidth = (\d)", code["ttgir"])) == {"2"}

"""The kernels of mixtures of experts compile for Hopper, with tensor cores for one row too; no GPU is needed."""

import re
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from emulators.gluon.language import Language
from emulators.gluon.tensors import Tensor
from overlap_spec_kernels.experts import (
    best_of_groups,
    experts_mlp,
    float4_products,
    products,
    quantized_products,
    route,
)
from overlap_spec_kernels.launch import next_power_of_2
from overlap_spec_kernels.linear import packing
from overlap_spec_kernels.norm import normed
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
ROUTED = {"SIZE_K": 2048, "EXPERTS": 128, "BLOCK_K": 128, "PDL": True}
PLAIN = {"BIASED": False, "CLAMPED": False, "PDL": True}
MATRIX = {"SIZE_K": 2048, "EXPERTS": 128, "TOP_K": 8, "BLOCK_E": 128, "BLOCK_T": 8, "BLOCK_K": 128}
FEW = MATRIX | PLAIN | {"LISTED": False, "ALONE": False, "BLOCK_M": 16, "BLOCK_N": 32, "STAGES": 4}
LISTED = {"LISTED": True}
MANY = FEW | LISTED | {"PDL": False, "BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 3}
MOST = MANY | {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "STAGES": 4}
CLAMPED = {"FIRST": True, "GATED": True, "BIASED": True, "CLAMPED": True}
GATED, DOWN = {"FIRST": True, "GATED": True}, {"FIRST": False, "GATED": False}
QUANTIZED = {name: value for name, value in FEW.items() if name != "BLOCK_K"} | {
    "BLOCK_N": 64,
    "ZEROS": False,
}
FP8 = QUANTIZED | {"BITS": 8, "GROUP": 0, "SCALE_ROWS": 1, "PART": 128}
FP8_BLOCKS = FP8 | {"GROUP": 128, "SCALE_ROWS": 128}
INT4 = FP8 | {"BITS": 4, "GROUP": 128}
AWQ = INT4 | {"GROUP": 32, "PART": 64, "ZEROS": True}
LARGE = LISTED | {"PDL": False, "BLOCK_M": 128, "BLOCK_N": 128, "STAGES": 3}
MOST_ROWS = {"SIZE_K": 2048, "EXPERTS": 128, "BLOCK_E": 128, "ROWS": 128, "REST": 64, "BLOCK_N": 128, "STAGES": 3}
MOST_ROWS |= {"HALF": 64, "GROUP": 0, "SCALE_ROWS": 1, "GATED": True, "BIASED": True, "CLAMPED": False}
OF_BLOCKS = {"GROUP": 128, "SCALE_ROWS": 128, "GATED": False}
FLOAT4 = {"EXPERTS": 32, "TOP_K": 4, "UNIT": 126, "BLOCK_E": 32, "BLOCK_T": 4, "BLOCK_M": 16, "BLOCK_N": 32}
FLOAT4 |= {"ALONE": False}
MXFP4 = PLAIN | FLOAT4 | {"SIZE_K": 2880, "GROUP": 32, "FACTORS": False, "LISTED": False}
NVFP4 = PLAIN | FLOAT4 | {"SIZE_K": 2048, "GROUP": 16, "FACTORS": True, "LISTED": True}
MANY_FLOAT4 = {"LISTED": True, "BLOCK_M": 32, "BLOCK_N": 64, "PDL": False}
CHOICE = ROUTED | {"PARTS": 16, "SHARE": 1, "TOP_K": 8, "NORMALISED": True, "BIASED": True, "BLOCK": 128}
UNSCALED = {"SQUARES": 128, "BLOCK_S": 128}
CHOICE |= {"COMMON": 0, "SQUARES": 0, "BLOCK_S": 1, "EARLY": 8}
MOST_EXPERTS = {"EXPERTS": 512, "SHARE": 4, "TOP_K": 10, "BLOCK": 512, "COMMON": 2048, "EARLY": 11} | UNSCALED
MANY_ROWS = {"SHARE": 0, "PARTS": 1, "EARLY": 0, "PDL": False}
GROUPS = {"SIZE_K": 7168, "EXPERTS": 256, "PARTS": 56, "SHARE": 4, "TOP_K": 8, "NORMALISED": True, "SIGMOID": True}
GROUPS |= {"CORRECTED": True, "GROUPS": 8, "KEPT": 4, "RATED_BY": 2, "TINY": 1e-20, "BLOCK": 256, "BLOCK_G": 8}
GROUPS |= {"BLOCK_K": 128, "PDL": True, "COMMON": 8192, "SQUARES": 0, "BLOCK_S": 1, "EARLY": 9}
TYPES = {
    "scale": "fp32",
    "correction_ptr": "*fp32",
    "alpha": "fp32",
    "limit": "fp32",
    "eps": "fp32",
    "experts_ptr": "*i64",
    "counts_ptr": "*i32",
    "counters_ptr": "*i32",
    "places_ptr": "*i32",
    "weights_ptr": "*fp32",
    "partial_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "zeros_ptr": "*fp32",
    "squares_ptr": "*fp32",
}
SUM = {"TOP_K": 8, "BLOCK": 1024, "PDL": True}
KERNELS: dict[str, tuple[Any, int, dict[str, Any], str]] = {  # kernel, warps, constants, what the code must have
    "one row, gated": (products.multiply_kernel, 4, FEW | GATED | {"ALONE": True}, "mma.sync"),
    "few rows, gated": (products.multiply_kernel, 4, FEW | GATED, "mma.sync"),
    "few rows, clamped": (products.multiply_kernel, 4, FEW | CLAMPED, "mma.sync"),
    "few rows": (products.multiply_kernel, 4, FEW | LISTED | DOWN, "mma.sync"),
    "few rows, fp8": (quantized_products.multiply_quantized_kernel, 4, FP8 | GATED, "wgmma"),
    "few rows, blocks": (quantized_products.multiply_quantized_kernel, 4, FP8_BLOCKS | CLAMPED, "wgmma"),
    "one row, int4": (quantized_products.multiply_quantized_kernel, 4, INT4 | DOWN | {"ALONE": True}, "wgmma"),
    "few rows, int4": (quantized_products.multiply_quantized_kernel, 4, INT4 | DOWN, "wgmma"),
    "few rows, awq": (quantized_products.multiply_quantized_kernel, 4, AWQ | GATED, "wgmma"),
    "many rows, gated": (products.multiply_kernel, 4, MANY | GATED, "wgmma"),
    "many rows": (products.multiply_kernel, 4, MANY | DOWN, "wgmma"),
    "most rows, gated": (products.multiply_kernel, 8, MOST | GATED, "wgmma"),
    "many rows, fp8": (quantized_products.multiply_quantized_kernel, 8, FP8 | LARGE | GATED, "wgmma"),
    "many rows, int4": (quantized_products.multiply_quantized_kernel, 8, INT4 | LARGE | DOWN, "wgmma"),
    "most rows, fp8": (quantized_products.multiply_many_kernel, 8, MOST_ROWS, "wgmma"),
    "most rows, blocks": (quantized_products.multiply_many_kernel, 8, MOST_ROWS | OF_BLOCKS, "wgmma"),
    "few rows, mxfp4": (float4_products._multiply_float4_kernel, 4, MXFP4 | CLAMPED, "mma.sync"),
    "few rows, nvfp4": (float4_products._multiply_float4_kernel, 4, NVFP4 | DOWN, "mma.sync"),
    "many rows, mxfp4": (float4_products._multiply_float4_kernel, 4, MXFP4 | CLAMPED | MANY_FLOAT4, "mma.sync"),
    "many rows, nvfp4": (float4_products._multiply_float4_kernel, 4, NVFP4 | GATED | MANY_FLOAT4, "mma.sync"),
    "groups": (products.group_kernel, 4, {"BLOCK": 1024, "PDL": True}, "st.global"),
    "sums": (experts_mlp.sum_kernel, 8, SUM | {"ADDED": False, "SHARED": False}, "st.global"),
    "sums, added": (experts_mlp.sum_kernel, 8, SUM | {"ADDED": True, "SHARED": True}, "st.global"),
    "scales": (normed._normalised_kernel, 4, {"BLOCK": 2048, "BLOCK_P": 128, "PDL": True}, "st.global"),
    "logits": (route.router_logits_kernel, 4, ROUTED | {"PARTS": 1, "BLOCK": 16}, "mma.sync"),
    "logits of many rows": (route.router_logits_kernel, 4, ROUTED | {"PARTS": 16, "BLOCK": 64}, "wgmma"),
    "logits of most rows": (route.router_logits_kernel, 8, ROUTED | {"PARTS": 16, "BLOCK": 128}, "wgmma"),
    "choice": (route._route_kernel, 4, CHOICE, "mma.sync"),
    "choice, unscaled": (route._route_kernel, 4, CHOICE | UNSCALED, "mma.sync"),
    "choice of many experts": (route._route_kernel, 4, CHOICE | MOST_EXPERTS, "redux.sync"),
    "choice of many rows": (route._route_kernel, 4, CHOICE | MANY_ROWS, "st.global"),
    "choice of groups": (best_of_groups._best_of_groups_kernel, 4, GROUPS, "mma.sync"),
    "choice of groups of many rows": (best_of_groups._best_of_groups_kernel, 4, GROUPS | MANY_ROWS, "st.global"),
}


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(18)
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_without_spills(name: str) -> None:
    kernel, num_warps, constants, expected = KERNELS[name]
    ptx = compiled(kernel, num_warps, constants)["ptx"]
    assert expected in ptx and ".local" not in ptx
    if constants.keys() & {"PART", "HALF"}:  # `mma.sync` would add columns of K in another order
        assert "mma.sync" not in ptx


@pytest.mark.parametrize("experts", [40, 128, 300])
def test_no_two_warps_read_a_part_of_a_row(experts: int) -> None:
    """Before and in the loop that waits for parts; a sum of one that is there and one that is not would be lost."""
    block = next_power_of_2(experts)
    warps, constants = route.warps_of_choice(block), CHOICE | {"EXPERTS": experts, "BLOCK": block}
    words = re.findall(r"ld\.volatile\.global(?:\.v(\d))?\.b32", compiled(route._route_kernel, warps, constants)["ptx"])
    assert sum(int(count or 1) for count in words) * 32 * warps == 2 * CHOICE["PARTS"] * block


def test_the_next_kernel_begins_when_no_expert_is_chosen() -> None:
    """It waits for each by itself."""
    ptx = compiled(route._route_kernel, 4, CHOICE)["ptx"]
    assert re.findall(r"griddepcontrol\.\w+|st\.global\.b64|atom[\w.]+exch|bar\.sync", ptx)[:12] == [
        "griddepcontrol.wait",
        *["st.global.b64"] * 8,
        "atom.global.gpu.acq_rel.exch",
        "bar.sync",  # of these one warp's
        "griddepcontrol.launch_dependents",
    ]


def test_a_products_sum_does_not_begin_with_a_bias() -> None:
    """In a loop of one step the compiler sees a product, of which nothing is added yet, and a bias after it."""
    constants = FEW | GATED | {"SIZE_K": 128, "BIASED": True}
    dots = [line for line in compiled(products.multiply_kernel, 4, constants)["ttir"].splitlines() if "tt.dot" in line]
    assert len(dots) == 2 and all("%cst" in line for line in dots)


def compiled(kernel: Any, num_warps: int, constants: dict[str, Any]) -> Any:
    """By the name of the stage."""
    function, types = kernel.compiled, TYPES
    if "FACTORS" in constants:
        types = types | {"words_ptr": "*i32", "scales_ptr": "*i32", "factors_ptr": "*fp32"}
    if constants.keys() & {"PART", "HALF"}:
        types = types | {"weight_ptr": "*u8"}
    signature = {
        argument: "constexpr"
        if argument in constants
        else types.get(argument, "*bf16" if argument.endswith("_ptr") else "i32")
        for argument in function.arg_names
    }
    by_place = {(function.arg_names.index(argument),): value for argument, value in constants.items()}
    options = {"num_warps": num_warps, "num_stages": 3}
    return triton.compile(ASTSource(function, signature, by_place), target=HOPPER, options=options).asm


def widened_by_assembly(kernel: Any, *more: int) -> np.ndarray[Any, Any]:
    """What it makes of all bytes, in bfloat16, by PTX that is interpreted."""
    language = SimpleNamespace(bfloat16=tl.bfloat16, inline_asm_elementwise=Language.inline_asm_elementwise)
    function = FunctionType(kernel.function.__code__, {"tl": language})
    found = function(Tensor(np.arange(256, dtype=np.uint8)[None], tl.uint8, None), *more, tl.bfloat16)
    assert found.dtype == tl.bfloat16
    return found.data[0]  # type: ignore[no-any-return]  # of an emulator


def test_bytes_are_widened_two_at_a_time() -> None:
    """Each value of float8 but NaN, zeros with their sign; 128 and each half of a byte."""
    stored = torch.arange(256, dtype=torch.uint8)
    expected, found = stored.view(torch.float8_e4m3fn).float(), widened_by_assembly(packing.of_8_bits)
    is_number = ~expected.isnan()
    assert is_number.sum() == 254
    assert torch.equal(torch.from_numpy(found).view(torch.int32)[is_number], expected.view(torch.int32)[is_number])
    for half in (0, 1):
        halves = widened_by_assembly(packing.of_4_bits, half)
        assert torch.equal(torch.from_numpy(halves), 128.0 + (stored >> 4 * half & 15))

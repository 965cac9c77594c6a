"""The kernels of mixtures of experts compile for Hopper, with tensor cores for one row too; no GPU is needed."""

from typing import Any

import pytest
import triton
from overlap_spec_kernels.experts import experts_mlp, route
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SIZES = {"SIZE_K": 2048, "EXPERTS": 128, "BLOCK_K": 128}
PLAIN = {"BIASED": False, "CLAMPED": False}
FEW = SIZES | PLAIN | {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_E": 128}
MANY = SIZES | PLAIN | {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_E": 128}
CLAMPED = {"GATED": True, "BIASED": True, "CLAMPED": True}
CHOICE = {"EXPERTS": 128, "TOP_K": 8, "NORMALISED": True, "BLOCK": 128, "BLOCK_K": 8}
TYPES = {
    "alpha": "fp32",
    "limit": "fp32",
    "experts_ptr": "*i64",
    "counts_ptr": "*i32",
    "places_ptr": "*i32",
    "weights_ptr": "*fp32",
}
KERNELS: dict[str, tuple[Any, int, dict[str, Any], str]] = {  # kernel, warps, constants, what the code must have
    "few rows, gated": (experts_mlp._multiply_kernel, 4, FEW | {"GATED": True}, "mma.sync"),
    "few rows, clamped": (experts_mlp._multiply_kernel, 4, FEW | CLAMPED, "mma.sync"),
    "few rows": (experts_mlp._multiply_kernel, 4, FEW | {"GATED": False}, "mma.sync"),
    "many rows, gated": (experts_mlp._multiply_kernel, 4, MANY | {"GATED": True}, "wgmma"),
    "many rows": (experts_mlp._multiply_kernel, 4, MANY | {"GATED": False}, "wgmma"),
    "groups": (experts_mlp._group_kernel, 4, {"BLOCK": 1024}, "st.global"),
    "sums": (experts_mlp._sum_kernel, 4, {"TOP_K": 8, "BLOCK": 1024}, "st.global"),
    "logits": (route._router_logits_kernel, 4, SIZES | {"BLOCK": 16, "BIASED": True}, "mma.sync"),
    "choice": (route._choose_experts_kernel, 1, CHOICE, "st.global"),
}


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_without_spills(name: str) -> None:
    kernel, num_warps, constants, expected = KERNELS[name]
    logits = "*fp32"
    function, types = kernel.compiled, TYPES | {"logits_ptr": logits}
    signature = {
        argument: "constexpr"
        if argument in constants
        else types.get(argument, "*bf16" if argument.endswith("_ptr") else "i32")
        for argument in function.arg_names
    }
    by_place = {(function.arg_names.index(argument),): value for argument, value in constants.items()}
    options = {"num_warps": num_warps, "num_stages": 3}
    ptx = triton.compile(ASTSource(function, signature, by_place), target=HOPPER, options=options).asm["ptx"]
    assert expected in ptx and ".local" not in ptx

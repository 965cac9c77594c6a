"""The kernels of Gated DeltaNet compile for Hopper, at the sizes of Qwen3-Next. No GPU is needed."""

from typing import Any

import pytest
import triton
from overlap_spec_kernels.recurrent import gated_delta
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
I64 = ("slots_ptr", "positions_ptr", "position_ptr", "counts_ptr")
FLOAT = ("memory_ptr", "steepness_ptr", "offset_ptr", "norm_ptr")
SIZES = {"C": 8192, "K": 4, "N": 32, "DV": 128, "PDL": True}
RECURS = {"M": 16, "DK": 128, "BLOCK_K": 128, "BLOCK_V": 32, "EPS": 1e-6}
FINISHES = {"BLOCK_H": 4, "BLOCK_V": 128, "BLOCK_W": 4, "BLOCK": 128}


def compiled(kernel: Any, constants: dict[str, Any], **options: int) -> Any:
    function, types = kernel.compiled, {"starts_ptr": "*i64" if constants["IS_WINDOW"] else "*i32", "scale": "fp32"}
    types |= {"eps": "fp32"} | dict.fromkeys(I64, "*i64") | dict.fromkeys(FLOAT, "*fp32")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in function.arg_names
    }
    by_place = {(function.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(function, signature, by_place), target=HOPPER, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("is_window", [True, False], ids=["windows", "prompts"])
def test_kernels_compile(is_window: bool) -> None:
    given = {**SIZES, "IS_WINDOW": is_window}
    assert ".local" not in compiled(gated_delta._recur_kernel, given | RECURS, num_warps=gated_delta._WARPS).asm["ptx"]
    assert ".local" not in compiled(gated_delta._finish_kernel, given | FINISHES).asm["ptx"]


def test_plain_and_drafted_steps_run_one_binary() -> None:
    """A width of 1 would else be a constant, with which a compiler may add up in another order."""
    for kernel in (gated_delta._recur_kernel, gated_delta._finish_kernel):
        unspecialised = {each.name for each in kernel.compiled.params if each.do_not_specialize}
        assert unspecialised >= {"width", "most"}

"""The kernels of a thinking budget compile for Hopper; no GPU is needed. The interpreter accepts what the compiler does
not."""

import importlib
from typing import Any

import pytest
import triton
from overlap_spec_kernels.sampling.reasoning_end import MARKER
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
KERNELS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    (
        "reasoning_end",
        {"PAGE_SIZE": 16, "MARKER": MARKER, "BLOCK": 128, "PDL": True},
        {"pool_ptr": "*i32", "page_table_ptr": "*i32"},
    ),
    ("force_columns", {"BLOCK": 1024, "PDL": True}, {"logits_ptr": "*bf16"}),
    ("force_columns", {"BLOCK": 1024, "PDL": True}, {"logits_ptr": "*fp32"}),
]


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(("name", "constants", "pointers"), KERNELS)
def test_it_compiles_without_spills(name: str, constants: dict[str, Any], pointers: dict[str, str]) -> None:
    module = importlib.import_module(f"overlap_spec_kernels.sampling.{name}")
    function = vars(module)[f"_{name}_kernel"].compiled
    signature = {
        argument: "constexpr"
        if argument in constants
        else pointers.get(argument, "*i64" if argument.endswith("_ptr") else "i32")
        for argument in function.arg_names
    }
    by_place = {(function.arg_names.index(argument),): value for argument, value in constants.items()}
    compiled = triton.compile(ASTSource(function, signature, by_place), target=HOPPER, options={"num_warps": 1})
    assert "griddepcontrol.wait" in compiled.asm["ptx"] and ".local" not in compiled.asm["ptx"]

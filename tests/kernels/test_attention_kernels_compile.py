"""Triton's kernels of decode steps and of chunks compile for Hopper with sinks and without; no GPU is needed.

The interpreter accepts what the compiler does not: a value that changes its shape within a branch, for one.
"""

from typing import Any

import pytest
import triton
from overlap_spec_kernels.attention import _decode_attention_kernel, paged_attention, trained_chains
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
OF_A_MODEL = ("qkv_ptr", "q_ptr", "k_cache_ptr", "v_cache_ptr", "k_ptr", "v_ptr", "out_ptr", "sinks_ptr")
TYPES = dict.fromkeys(OF_A_MODEL, "*bf16") | {"positions_ptr": "*i64", "shares_ptr": "*i64"}
TYPES |= dict.fromkeys(("page_table_ptr", "counters_ptr", "row_starts_ptr"), "*i32")
FLOATS = ("scale_log2", "inverse_k", "inverse_v", "v_scale")
DECODE = {
    "WIDTH": 4, "TILE_ROWS": 4, "NUM_KV_HEADS": 8, "GROUP": 8, "HALF": 32, "PAGE_SIZE": 16, "BLOCK_M": 32,
    "BLOCK_N": 128, "BLOCK_W": 16, "BLOCK_HALF": 32, "KEYS_PER_SPLIT": 256, "COMBINED": 4, "READ_BEFORE_WAIT": True,
    "UNEVEN": False, "WRITES": True, "AHEAD": 0, "PDL": True,
}  # fmt: skip
WIDE_HEADS = {"HALF": 256, "BLOCK_HALF": 256, "TILE_ROWS": 2, "BLOCK_M": 16, "BLOCK_N": 32, "AHEAD": 3}
CHUNKS = {
    "NUM_KV_HEADS": 8, "GROUP": 8, "HEAD_DIM": 64, "PAGE_SIZE": 16, "TILE_ROWS": 8, "BLOCK_M": 64, "BLOCK_N": 128,
    "BLOCK_D": 64,
}  # fmt: skip
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "decode": (_decode_attention_kernel.decode_attention_kernel, DECODE),
    "decode, wide heads": (_decode_attention_kernel.decode_attention_kernel, DECODE | WIDE_HEADS),
    "chunks": (paged_attention._paged_attention_kernel, CHUNKS | {"SPLIT": False}),
    "chunks in splits": (paged_attention._paged_attention_kernel, CHUNKS | {"SPLIT": True}),
}


@pytest.mark.full_but_every(5)
@pytest.mark.slow
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_without_spills(name: str, window: int, sinks: bool) -> None:
    kernel, constants = KERNELS[name]
    constants = constants | {"WINDOW": window, "SINKS": sinks}
    function = kernel.compiled
    signature = {argument: _kind(argument) for argument in function.arg_names} | dict.fromkeys(constants, "constexpr")
    by_place = {(function.arg_names.index(key),): value for key, value in constants.items()}
    aligned = [i for i, (key, kind) in enumerate(signature.items()) if kind.startswith("*") or "stride" in key]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(function, signature, constexprs=by_place, attrs=attributes)
    options = {"num_warps": 8 if constants.get("AHEAD") else 4, "num_stages": 2}
    ptx = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    assert "mma" in ptx and ".local" not in ptx


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("name", ["split_rotated", "own_keys_back", "own_keys"])
def test_what_trains_chains_compiles_without_spills(name: str) -> None:
    sizes = {"HEADS": 32, "KV_HEADS": 8, "HEADS_BLOCK": 32, "SIZE": 128, "BLOCK": 128, "GROUP": 4, "KV_BLOCK": 8}
    if name == "split_rotated":
        sizes |= {"HEADS_BLOCK": 64, "HALF": 64, "BLOCK": 64, "IS_BACK": True}
    function = vars(trained_chains)[f"_{name}_kernel"].compiled
    constants = {key: value for key, value in sizes.items() if key in function.arg_names}
    floats = dict.fromkeys(("cos_sin_ptr", "logs_ptr", "sums_ptr"), "*fp32")
    kinds = {key: "*bf16" if key.endswith("_ptr") else "i32" for key in function.arg_names}
    signature = kinds | floats | dict.fromkeys(constants, "constexpr")
    signature = {key: signature[key] for key in function.arg_names}
    by_place = {(function.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(function, signature, constexprs=by_place)
    ptx = triton.compile(source, target=HOPPER, options={"num_warps": trained_chains._NUM_WARPS}).asm["ptx"]
    assert ".local" not in ptx


def _kind(argument: str) -> str:
    default = "*fp32" if argument.endswith("_ptr") else "fp32" if argument in FLOATS else "i32"
    return TYPES.get(argument, default)

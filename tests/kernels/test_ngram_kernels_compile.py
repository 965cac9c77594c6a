"""The kernels of n-grams compile for Hopper; no GPU is needed. The interpreter accepts what the compiler does not."""

import importlib
from typing import Any

import pytest
import triton
from overlap_spec_kernels.ngram.ngram_log import BANDS, HASH_STEP, PAGE
from overlap_spec_kernels.ngram.ngram_match import MATCH_SHIFT, OWN_BIT, OWN_MATCHES
from support.ngram_inputs import LIMITS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
INT32 = ("pool_ptr", "page_table_ptr", "log_tokens_ptr", "fill_ptr")
RECENT = LIMITS["by recency"]
COMMON: dict[str, Any] = {
    "MAX_MATCH": RECENT.max_match, "SIZES": sum(1 << size for size in RECENT.sizes), "HASH_STEP": HASH_STEP,
    "PAGE": PAGE, "BANDS": BANDS, "MATCH_SHIFT": MATCH_SHIFT, "OWN_BIT": OWN_BIT,
    "OWN": OWN_MATCHES, "COUNT": OWN_MATCHES,
    "CONTEXT": RECENT.context, "BRANCH": RECENT.branch, "PDL": True,
}  # fmt: skip
MERGE = {"NUM_LEVELS": 11, "NO_RANK": 64, "BLOCK_N": 128, "BLOCK_M": 16, "BLOCK_C": 32, "BLOCK_L": 16}
KERNELS: list[tuple[str, str, dict[str, Any]]] = [
    ("window.store_tokens", "_store_tokens_kernel", {"BLOCK": 16}),
    ("ngram.ngram_match", "_ngram_match_kernel", {"BLOCK": 1024}),
    ("ngram.ngram_match", "_ngram_match_kernel", {"BLOCK": 2048, "PAGE_SIZE": 1}),
    ("ngram.ngram_absorb", "_ngram_absorb_kernel", {"BLOCK_B": 64}),
    ("ngram._ngram_merge_kernel", "_ngram_merge_kernel", MERGE | {"BY_FREQUENCY": False}),
    (
        "ngram._ngram_merge_kernel",
        "_ngram_merge_kernel",
        MERGE | {"BY_FREQUENCY": True, "BLOCK_N": 2048, "PAGE_SIZE": 1},
    ),
    ("ngram.ngram_lookahead", "_ngram_lookahead_kernel", {"BLOCK_K": 16, "BLOCK_D": 16}),
]


@pytest.mark.slow_but_every(8)
@pytest.mark.parametrize(("module", "name", "constants"), KERNELS)
def test_it_compiles_without_spills(module: str, name: str, constants: dict[str, Any]) -> None:
    function = vars(importlib.import_module(f"overlap_spec_kernels.{module}"))[name].compiled
    known = COMMON | {"PAGE_SIZE": 16} | constants
    constants = {argument: known[argument] for argument in function.arg_names if argument in known}
    pointers = dict.fromkeys(INT32, "*i32") | ({"tokens_ptr": "*i32"} if module == "ngram.ngram_absorb" else {})
    signature = {
        argument: "constexpr"
        if argument in constants
        else pointers.get(argument, "*i64" if argument.endswith("_ptr") else "i32")
        for argument in function.arg_names
    }
    by_place = {(function.arg_names.index(argument),): value for argument, value in constants.items()}
    compiled = triton.compile(ASTSource(function, signature, by_place), target=HOPPER, options={"num_warps": 4})
    assert "griddepcontrol.wait" in compiled.asm["ptx"] and ".local" not in compiled.asm["ptx"]

"""The kernels that change logits compile for Hopper; no GPU is needed. The interpreter accepts what the compiler does
not."""

import importlib
from typing import Any

import pytest
import triton
from overlap_spec_kernels.logits.count_tokens import IN_PROMPT
from overlap_spec_kernels.logits.reasoning_end import MARKER
from overlap_spec_kernels.logits.soft_cross_entropy import (
    _BLOCK,
    _LEAST,
    _MOST,
    _MOST_WARPS,
    _NUM_WARPS,
    _soft_cross_entropy_kernel,
    _token_losses_kernel,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = dict.fromkeys(("pool_ptr", "page_table_ptr", "counts_ptr", "words_ptr"), "*i32")
POINTERS |= {"logits_ptr": "*fp32", "new_ptr": "*fp32", "bias_ptr": "*fp32", "penalties_ptr": "*fp64"}
POINTERS |= dict.fromkeys(
    ("maxima_ptr", "sums_ptr", "pivots_ptr", "masses_ptr", "listed_ptr", "least_ptr", "before_ptr"), "*fp32"
)
POINTERS |= dict.fromkeys(("temperature_ptr", "top_p_ptr", "min_p_ptr", "brackets_ptr", "noisy_ptr"), "*fp64")
POINTERS |= dict.fromkeys(("fill_ptr", "listed_at_ptr", "at_ptr", "state_ptr"), "*i32")
PROCESS = {"PAGE_SIZE": 16, "MARKER": MARKER, "WORD": 8, "PROMPT": IN_PROMPT, "BLOCK": 2048, "POSITIONS": 128}
PATHS = {"ROOT": 0, "HAS_NODES": False, "BLOCK": 64}
DRAWN = {"DRAWN": True, "AGAIN": True}
ROW_STATES = {"OPEN": 0, "SEARCHED": 1, "SETTLED": 2}
SKIPS = {"SKIPPED": 2, "NOTHING": -2}
KERNELS: list[tuple[str, int, dict[str, Any]]] = [
    ("process_logits._process_logits_kernel", 8, PROCESS | {"DEPTH": 3}),
    ("process_logits._process_logits_kernel", 8, PROCESS | {"DEPTH": 0, "PAGE_SIZE": 1}),
    ("guesses_before._guesses_before_kernel", 1, PATHS | {"DEPTH": 8, "HAS_PARENTS": True}),
    ("guesses_before._guesses_before_kernel", 1, PATHS | {"DEPTH": 3, "HAS_PARENTS": False}),
    ("_filter_kernels.part_stats_kernel", 8, {"QUARTER": 1024, **DRAWN}),
    ("_filter_kernels.first_bracket_kernel", 4, {"PARTS": 32, "PIVOTS": 8, **ROW_STATES, **DRAWN}),
    ("_filter_kernels.count_above_kernel", 8, {"PART": 4096, "PIVOTS": 8}),
    ("_filter_kernels.narrow_bracket_kernel", 1, {"PARTS": 32, "PIVOTS": 8, "FEW": 1024}),
    ("_filter_kernels.gather_bracket_kernel", 8, {"PART": 4096, "CAPACITY": 8192}),
    ("_filter_kernels.select_cutoff_kernel", 8, {"CAPACITY": 8192, "BLOCK": 1024}),
    ("gumbel_argmax._best_of_part_kernel", 4, {"PART": 1024, "GROUP": 4, "CUT": True, "FEW": 0, **SKIPS}),
    ("gumbel_argmax._best_of_part_kernel", 4, {"PART": 1024, "GROUP": 1, "CUT": False, "FEW": 64, **SKIPS}),
    ("gumbel_argmax._best_of_row_kernel", 4, {"BLOCK": 128, **SKIPS}),
    ("noisy_logits._noisy_logits_kernel", 4, {"PART": 1024, "GROUP": 4, "CUT": True}),
    ("noisy_logits._noisy_logits_kernel", 4, {"PART": 1024, "GROUP": 1, "CUT": False}),
]


@pytest.mark.slow_but_every(8)
@pytest.mark.parametrize(("name", "num_warps", "constants"), KERNELS)
def test_it_compiles_without_spills(name: str, num_warps: int, constants: dict[str, Any]) -> None:
    module, _, kernel = name.rpartition(".")
    function = vars(importlib.import_module(f"overlap_spec_kernels.logits.{module}"))[kernel].compiled
    constants = constants | {"PDL": True}
    signature = {
        argument: "constexpr"
        if argument in constants
        else POINTERS.get(argument, "*i64" if argument.endswith("_ptr") else "i32")
        for argument in function.arg_names
    }
    by_place = {(function.arg_names.index(argument),): value for argument, value in constants.items()}
    compiled = triton.compile(ASTSource(function, signature, by_place), target=HOPPER, options={"num_warps": num_warps})
    assert "griddepcontrol.wait" in compiled.asm["ptx"] and ".local" not in compiled.asm["ptx"]


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(("block", "num_warps"), [(_BLOCK, _NUM_WARPS), (_MOST, _MOST_WARPS)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_losss_gradient_compiles_without_spills(dtype: str, block: int, num_warps: int) -> None:
    function = _soft_cross_entropy_kernel.compiled
    constants = {"IS_WHOLE": block == _MOST, "BLOCK": block, "LEAST": _LEAST}
    signature = {
        name: "constexpr" if name in constants else f"*{'fp32' if name != 'logits_ptr' else dtype}"
        for name in function.arg_names
    } | {"size": "i32", "weights_stride": "i32"}
    source = ASTSource(function, signature, {(function.arg_names.index(n),): v for n, v in constants.items()})
    assert ".local" not in triton.compile(source, target=HOPPER, options={"num_warps": num_warps}).asm["ptx"]


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("has_target", [True, False])
def test_a_tokens_losses_compile_without_spills(has_target: bool) -> None:
    function = _token_losses_kernel.compiled
    constants = {"HAS_TARGET": has_target, "BLOCK": _BLOCK, "LEAST": _LEAST}
    types = {"logits_ptr": "*bf16", "target_ptr": "*bf16", "tokens_ptr": "*i64", "share": "fp32"}
    types |= {"size": "i32", "weights_stride": "i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*fp32") for name in function.arg_names}
    source = ASTSource(function, signature, {(function.arg_names.index(n),): v for n, v in constants.items()})
    assert ".local" not in triton.compile(source, target=HOPPER, options={"num_warps": _NUM_WARPS}).asm["ptx"]

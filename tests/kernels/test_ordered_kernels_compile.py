"""What the kernels of one order become on a Hopper: all of their products take neighbouring columns of K; no GPU.

An instruction of a tensor core adds up 16 columns of K at once. Which ones follows from how many columns in a row a
thread holds of an operand: two. Of values that were loaded in 8 bits or less the compiler gives it four, in `mma.sync`
and not in `wgmma`: then tiles of few rows and of many add up K in two orders. The interpreter knows nothing of it.
"""

import re
from typing import Any

import pytest
import triton
from overlap_spec_kernels.attention import latent_heads, ordered_attention, ordered_windows
from overlap_spec_kernels.linear import ordered, ordered_quantized
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LINEAR = {
    "SIZE_K": 256, "GATED": False, "SCALED": True, "PARTS": 0, "ADD": False, "BIASED": False, "PIECES": False,
    "BLOCK_N": 32, "BLOCK_K": 128, "GROUP": 8, "PDL": True,
}  # fmt: skip
PIECES = LINEAR | {"SCALED": False, "PARTS": 16, "ADD": True, "BIASED": True, "PIECES": True, "BLOCK_K": 64}
FEW_BITS = {
    "RUNS": 2, "PART": 128, "SCALE_ROWS": 1, "ZEROS": False, "ZERO_POINT": 8, "BIAS": 128, "GATED": False,
    "COMPILED": True, "BLOCK_N": 32, "PDL": True,
}  # fmt: skip
ATTENTION = {
    "NUM_KV_HEADS": 2, "GROUP": 4, "HEAD_DIM": 64, "PAGE_SIZE": 16, "APART": True, "WINDOW": 0, "FIRST_PART": 128,
    "FEW": 8, "BLOCK_N": 64, "BLOCK_D": 64, "READ_BEFORE_WAIT": True, "PDL": True,
}  # fmt: skip
OF_ROWS = ATTENTION | {"EIGHT_BITS": False, "SINKS": False, "PARTS_OF_VALUES": 1}
LARGE = OF_ROWS | {"APART": False, "HEAD_DIM": 512, "BLOCK_N": 32, "BLOCK_D": 512, "PARTS_OF_VALUES": 2}
WINDOWS = ATTENTION | {"WIDTH": 4, "BLOCK_W": 4, "IN_REGISTERS": False, "LATE": False}
OF_HEADS = {"SIZE_K": 512, "SIZE_N": 128, "BLOCK_N": 64, "BLOCK_K": 64, "PDL": True}
KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    "16 bits, pieces": (ordered._ordered_linear_kernel, PIECES, {}),
    "16 bits": (ordered._ordered_linear_kernel, LINEAR, {}),
    "int4": (ordered_quantized._ordered_quantized_kernel, FEW_BITS | {"BITS": 4, "GROUP": 128}, {"data_ptr": "*u8"}),
    "fp8": (ordered_quantized._ordered_quantized_kernel, FEW_BITS | {"BITS": 8, "GROUP": 0}, {"data_ptr": "*u8"}),
    "attention, 8 bits": (
        ordered_attention._ordered_attention_kernel,
        OF_ROWS | {"EIGHT_BITS": True},
        {"k_ptr": "*fp8e4nv", "v_ptr": "*fp8e4nv"},
    ),
    "attention": (ordered_attention._ordered_attention_kernel, OF_ROWS, {}),
    "products of heads": (latent_heads._head_products_kernel, OF_HEADS, {}),
    "attention of large heads": (ordered_attention._ordered_attention_kernel, LARGE, {}),
    "attention with sinks": (
        ordered_attention._ordered_attention_kernel,
        OF_ROWS | {"SINKS": True, "APART": False, "WINDOW": 300},
        {},
    ),
    "attention of windows, 8 bits": (
        ordered_windows._ordered_windows_kernel,
        WINDOWS | {"EIGHT_BITS": True},
        {"k_ptr": "*fp8e4nv", "v_ptr": "*fp8e4nv"},
    ),
    "attention of windows": (ordered_windows._ordered_windows_kernel, WINDOWS | {"EIGHT_BITS": False}, {}),
    "attention of a row": (
        ordered_windows._ordered_windows_kernel,
        WINDOWS | {"EIGHT_BITS": False, "WIDTH": 1, "BLOCK_W": 1, "IN_REGISTERS": True},
        {},
    ),
}
TYPES = {
    "scales_ptr": "*fp32", "zeros_ptr": "*fp32", "stats_ptr": "*fp32", "page_table_ptr": "*i32",
    "row_starts_ptr": "*i32", "positions_ptr": "*i64", "scale_log2": "fp32", "v_scale": "fp32",
    "squares_ptr": "*fp32", "sums_ptr": "*fp32", "eps": "fp32", "inverse_k": "fp32", "inverse_v": "fp32",
    "cos_sin_ptr": "*fp32", "partial_ptr": "*fp32", "counters_ptr": "*i32",
}  # fmt: skip


@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("name", KERNELS)
def test_products_take_neighbouring_columns(name: str, rows: int) -> None:
    kernel, constants, own = KERNELS[name]
    function = kernel.compiled
    constants = constants | {"BLOCK_M": rows} | ({"TILE_ROWS": rows // 4} if "TILE_ROWS" in function.arg_names else {})
    default = {key: "*bf16" if key.endswith("_ptr") else "i32" for key in function.arg_names}
    signature = default | {key: kind for key, kind in (TYPES | own).items() if key in default}
    signature |= dict.fromkeys(constants, "constexpr")
    places = {key: (index,) for index, key in enumerate(function.arg_names)}
    aligned = [key for key in default if signature[key].startswith("*") or "stride" in key]
    source = ASTSource(
        function,
        signature,
        constexprs={places[key]: value for key, value in constants.items()},
        attrs={places[key]: [["tt.divisibility", 16]] for key in aligned},
    )
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
    assembly = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    operands = re.findall(r"kWidth = (\d+)", assembly["ttgir"])
    assert set(operands) <= {"2"} and (rows > 16 or operands)
    two_sums = re.search(r"arith.addf %\w+#0, %\w+#\d", assembly["ttir"])
    assert (two_sums is not None) == ("pieces" in name), "two sums of K became one"
    assert ("wgmma" if rows > 16 else "mma.sync") in assembly["ptx"]
    fused = "fma" in assembly["ptx"].replace("wgmma", "")
    assert fused == ("attention" in name), "a product and a sum are rounded apart, but where the source has them as one"

"""The kernels of trees compile for Hopper, as the engine launches them; no GPU is needed.

The interpreter accepts what the compiler does not: layouts of masks that come from a reduction, for one.
"""

import importlib
import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
INT32 = dict.fromkeys(("page_table_ptr", "pages_ptr", "counters_ptr", "at_ptr"), "*i32")
FLOATS = ("outputs_ptr", "weights_ptr", "sums_ptr", "log_probs_ptr", "values_ptr", "logs_ptr")
FLOATS += ("log_prob_ptr", "best_log_prob_ptr", "candidate_log_prob_ptr")
MODEL = ("q_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr", "k_ptr", "v_ptr", "features_ptr", "best_features_ptr")
MODEL += ("sinks_ptr",)

LLAMA = {
    "TILE_ROWS": 16, "NUM_KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "PAGE_SIZE": 16, "BLOCK_M": 64, "BLOCK_N": 64,
    "BLOCK_E": 32, "BLOCK_D": 128, "KEYS_PER_SPLIT": 256, "COMBINED": 1, "WINDOW": 0, "SINKS": False, "PDL": True,
}  # fmt: skip
SMOL = LLAMA | {"NUM_KV_HEADS": 3, "GROUP": 3, "HEAD_DIM": 64, "BLOCK_D": 64, "TILE_ROWS": 10, "BLOCK_M": 32}
FLOAT = {"BLOCK_M": 16, "TILE_ROWS": 4, "BLOCK_N": 16, "BLOCK_E": 16, "KEYS_PER_SPLIT": 64, "COMBINED": 4}
ATTENTION: dict[str, tuple[str, int, dict[str, Any]]] = {
    "8B": ("bf16", 4, LLAMA),
    "8B, all keys in a tile": ("bf16", 8, LLAMA | {"BLOCK_M": 128, "TILE_ROWS": 32}),
    "8B in a window": ("fp16", 4, LLAMA | {"WINDOW": 100}),
    "8B in a window with sinks": ("bf16", 4, LLAMA | {"WINDOW": 100, "SINKS": True}),
    "8B, float32": ("fp32", 8, LLAMA | FLOAT),
    "SmolLM2": ("bf16", 4, SMOL),
    "SmolLM2, float32, pages of a token": ("fp32", 8, SMOL | FLOAT | {"PAGE_SIZE": 1, "BLOCK_N": 32, "BLOCK_E": 32}),
}
MOVE = "attention.move_cache_rows"
# Module, function, type of what the model computes in, of scores; warps, constants.
OTHERS: list[tuple[str, str, str, str, int, dict[str, Any]]] = [
    ("window.gather_tree", "_gather_tree_kernel", "bf16", "fp32", 4, {"PAGE_SIZE": 16, "BLOCK_W": 32, "BLOCK_P": 256}),
    ("window.place_tree", "_place_tree_kernel", "bf16", "fp32", 1, {"BLOCK_N": 32}),
    (
        "attention.move_cache_rows",
        "_move_cache_rows_kernel",
        "bf16",
        "fp32",
        4,
        {"ROW_SIZE": 1024, "HAS_V": True, "BLOCK_D": 8, "BLOCK_C": 512},
    ),
    (
        "attention.move_cache_rows",
        "_move_cache_rows_kernel",
        "fp32",
        "fp32",
        4,
        {"ROW_SIZE": 20, "HAS_V": False, "BLOCK_D": 1, "BLOCK_C": 32},
    ),
    ("tree.top_tokens", "_top_of_part_kernel", "bf16", "fp32", 1, {"K": 8, "BLOCK_K": 8, "GROUPS": 256, "GROUP": 8}),
    ("tree.top_tokens", "_top_of_part_kernel", "bf16", "fp32", 1, {"K": 3, "BLOCK_K": 4, "GROUPS": 64, "GROUP": 8}),
    ("tree.top_tokens", "_top_of_row_kernel", "bf16", "fp32", 4, {"K": 16, "BLOCK": 2048, "BLOCK_P": 128}),
    ("tree.top_tokens", "_wide_top_of_part_kernel", "bf16", "fp64", 4, {"K": 8, "BLOCK": 2048}),
    ("tree.top_tokens", "_wide_top_of_row_kernel", "bf16", "fp64", 4, {"K": 8, "BLOCK": 128, "BLOCK_P": 16}),
    ("tree.add_children", "_add_children_kernel", "bf16", "fp32", 4, {"BLOCK": 128}),
    ("tree.add_children", "_add_children_kernel", "bf16", "fp64", 4, {"BLOCK": 128}),
    ("tree.select_tree", "_select_tree_kernel", "bf16", "fp32", 1, {"BLOCK_C": 8, "CHUNK": 256}),
    ("tree.select_tree", "_select_tree_kernel", "bf16", "fp64", 1, {"BLOCK_C": 8, "CHUNK": 256}),
    ("tree.select_tree", "_select_tree_kernel", "bf16", "fp64", 4, {"BLOCK_C": 32, "CHUNK": 32}),
    ("tree.marginal_tree", "_marginal_tree_kernel", "bf16", "fp32", 1, {"BLOCK": 16}),
    ("tree.marginal_tree", "_marginal_tree_kernel", "bf16", "fp64", 1, {"BLOCK": 64}),
]
JUDGE = {"BLOCK_W": 32, "BLOCK_D": 8, "BLOCK_N": 32}
OTHERS += [
    ("window._judge_tree_kernel", "judge_tree_kernel", "bf16", "fp32", 1, JUDGE | {"GIVEN": g}) for g in (False, True)
]
EXPAND = {"TOPK": 8, "BLOCK_C": 64, "BLOCK_K": 8, "BLOCK_F": 512, "CHUNK": 32}
OTHERS += [
    ("tree.expand_tree", "_expand_tree_kernel", model, scores, 4, EXPAND)
    for model, scores in (("bf16", "fp32"), ("fp32", "fp64"))
]


def assembly(
    module: str, name: str, dtype: str, scores: str, num_warps: int, constants: dict[str, Any], logits: str = ""
) -> str:
    """PTX, with the alignments that a launch has."""
    function = vars(importlib.import_module(f"overlap_spec_kernels.{module}"))[name].compiled
    types = INT32 | dict.fromkeys(FLOATS, f"*{scores}") | dict.fromkeys(MODEL, f"*{dtype}") | {"scale_log2": "fp32"}
    types["logits_ptr"] = f"*{logits or scores}"
    signature = {
        argument: types.get(argument, "*i64" if argument.endswith("_ptr") else "i32") for argument in function.arg_names
    }
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [i for i, (key, kind) in enumerate(signature.items()) if kind.startswith("*") or "stride" in key]
    source = ASTSource(
        function,
        signature,
        constexprs={(function.arg_names.index(key),): value for key, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": 2}
    text: str = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    return text


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    """Keys are copied 16 bytes at a time while others are multiplied; it waits once for the kernel before it."""
    dtype, num_warps, constants = ATTENTION[name]
    ptx = assembly("attention._tree_attention_kernel", "tree_attention_kernel", dtype, "fp32", num_warps, constants)
    copies = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert copies and set(copies) == {"0x10"}
    assert ptx.count("griddepcontrol.wait") == 1 and ".local" not in ptx
    assert ("wgmma.mma_async" in ptx) == (constants["BLOCK_M"] >= 64)
    assert (dtype == "fp32") != ("mma" in ptx), "float32 is not multiplied as TF32"


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(9)
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: f"{case[1]}-{case[2]}-{case[3]}")
def test_others(case: tuple[str, str, str, str, int, dict[str, Any]]) -> None:
    *known, constants = case
    ptx = assembly(*known, constants | {"PDL": True})
    assert ptx.count("griddepcontrol.wait") == 1 and ".local" not in ptx


def test_a_move_reads_all_its_rows_before_it_writes_one() -> None:
    module, name, *rest, constants = OTHERS[2]
    ptx = assembly(module, name, *rest, constants | {"PDL": True})
    assert ptx.rindex("ld.global") < ptx.index("bar.sync") < ptx.index("st.global")


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_logits_of_16_bits(dtype: str) -> None:
    module, name, *rest, constants = OTHERS[4]
    assert "griddepcontrol.wait" in assembly(module, name, *rest, constants | {"PDL": True}, logits=dtype)

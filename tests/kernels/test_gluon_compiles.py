"""The Gluon kernels compile for Hopper, as the engine launches them; no GPU is needed. `test_gluon_*.py` run them."""

import re
from typing import Any

import pytest
import triton
from overlap_spec_kernels.attention import (
    _decode_attention_8bit,
    _decode_attention_gluon,
    _tree_attention_gluon,
    large_heads,
)
from overlap_spec_kernels.experts import sum_of_experts
from overlap_spec_kernels.linear import streamed_linear, warpgroup_linear
from support.torn_conversions import conversions_to_8_bits, torn_conversions
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

HOPPER = GPUTarget("cuda", 90, 32)
FLOAT32 = ("squares_ptr", "sums_ptr", "best_ptr", "cos_sin_ptr", "outputs_ptr", "weights_ptr", "partial_ptr")
INTEGERS = {
    "best_at_ptr": "*i32", "counters_ptr": "*i32", "page_table_ptr": "*i32", "positions_ptr": "*i64",
    "prefix_ptr": "*i64", "extra_rows_ptr": "*i64", "mask_ptr": "*i64", "k_pairs_ptr": "*i16", "v_pairs_ptr": "*i16",
    "shares_ptr": "*i64", "experts_ptr": "*i64",
}  # fmt: skip
LINEAR = {
    "SCALED": False, "GATED": False, "ADD": False, "ARGMAX": False, "BIASED": False, "PDL": True, "LATE": False,
    "ROWS": 8, "BLOCK_N": 16, "BLOCK_K": 256, "WARPS_K": 4, "WARPS_N": 1, "STAGES": 4, "BLOCK_U": 256,
    "SIZE_K": 4096, "IN_ORDER": False,
}  # fmt: skip
SMALL = LINEAR | {"BLOCK_K": 64, "WARPS_K": 1, "STAGES": 8, "SIZE_K": 576, "BLOCK_U": 64, "LATE": True}
STREAMED: dict[str, dict[str, Any]] = {
    "8B output": LINEAR | {"ADD": True, "BLOCK_K": 1024},
    "8B gate, up": LINEAR | {"SCALED": True, "GATED": True, "BLOCK_K": 512, "STAGES": 5},
    "K of whole 256": LINEAR | {"SCALED": True, "STAGES": 12, "SIZE_K": 18688},
    "SmolLM2, 64 rows": SMALL | {"SCALED": True, "ROWS": 32, "BLOCK_N": 32, "WARPS_N": 2},
    "8B output, in one order": LINEAR | {"BLOCK_N": 32, "WARPS_K": 1, "WARPS_N": 2, "STAGES": 7},
    "8B gate, up, in one order": LINEAR
    | {"BLOCK_N": 32, "WARPS_K": 1, "WARPS_N": 2, "STAGES": 4, "GATED": True, "ROWS": 16},
    "SmolLM2, in one order": SMALL | {"WARPS_K": 2, "GATED": True, "ROWS": 16, "SCALED": True, "IN_ORDER": True},
    "SmolLM2 down, in one order": SMALL | {"WARPS_K": 2, "BLOCK_K": 128, "SIZE_K": 1536, "ADD": True, "IN_ORDER": True},
    "gpt-oss output": LINEAR | {"ADD": True, "BLOCK_K": 1024, "BIASED": True},
    "gpt-oss qkv": LINEAR | {"SCALED": True, "BLOCK_K": 1024, "SIZE_K": 2880, "BIASED": True},
    "SmolLM2 head": SMALL | {"ARGMAX": True, "BLOCK_N": 64, "WARPS_N": 4},
}
TILES = {
    "SCALED": False, "GATED": False, "ADD": False, "ARGMAX": False, "BIASED": False, "PDL": True, "ROWS": 32,
    "BLOCK_N": 64, "BLOCK_K": 128, "STAGES": 8, "SPLITS": 1, "IN_PAIRS": False, "WARPS": 4, "BLOCK_U": 64,
    "SIZE_K": 4096,
}  # fmt: skip
TILED: dict[str, dict[str, Any]] = {
    "8B output, 32 rows": TILES | {"ADD": True, "SPLITS": 2},
    "8B gate, up, 32 rows": TILES | {"SCALED": True, "GATED": True, "STAGES": 5},
    "8B gate, up, 128 rows": TILES
    | {"GATED": True, "ROWS": 128, "BLOCK_N": 128, "BLOCK_K": 64, "STAGES": 4, "WARPS": 8},
    "gpt-oss output, 32 rows": TILES | {"ADD": True, "SPLITS": 2, "BIASED": True},
    "8B head, 32 rows": TILES | {"ARGMAX": True},
    "8B down, 32 rows, in one order": TILES | {"IN_PAIRS": True, "SIZE_K": 14336},
    "8B linear, 17 rows": TILES | {"SCALED": True, "ROWS": 32},
}
ATTENTION = {
    "WIDTH": 4, "NUM_KV_HEADS": 3, "GROUP": 3, "HEAD": 64, "PAGE_SIZE": 16, "WARPS": 4, "KEYS": 32, "STAGES": 2,
    "KEYS_PER_SPLIT": 128, "COMBINED": 8, "READ_BEFORE_WAIT": True, "UNEVEN": False, "PDL": True,
    "LATE": True,
}  # fmt: skip
ATTENTIONS: dict[str, dict[str, Any]] = {
    "SmolLM2": ATTENTION,
    "8B": ATTENTION
    | {"NUM_KV_HEADS": 8, "GROUP": 4, "HEAD": 128, "KEYS": 16, "STAGES": 3, "COMBINED": 4, "LATE": False},
    "8B, one request": ATTENTION
    | {"NUM_KV_HEADS": 8, "GROUP": 4, "HEAD": 128, "WARPS": 8, "KEYS": 16, "STAGES": 3, "COMBINED": 16},
    "8B, by length": ATTENTION
    | {"NUM_KV_HEADS": 8, "GROUP": 4, "HEAD": 128, "KEYS": 16, "STAGES": 3, "COMBINED": 4, "UNEVEN": True},
    "page size 1, nothing read before the wait": ATTENTION | {"PAGE_SIZE": 1, "READ_BEFORE_WAIT": False},
}
EIGHT_BITS_8B = ATTENTIONS["8B"] | {"KEYS": 32, "E4M3": True}
EIGHT_BITS: dict[str, dict[str, Any]] = {
    "8B, several requests": EIGHT_BITS_8B,
    "8B, e5m2, page size 1": EIGHT_BITS_8B | {"WIDTH": 3, "PAGE_SIZE": 1, "READ_BEFORE_WAIT": False, "E4M3": False},
    "8B, by length": ATTENTIONS["8B, by length"] | {"KEYS": 32, "E4M3": True},
    "8B, one request": ATTENTIONS["8B, one request"] | {"KEYS": 32, "KEYS_PER_SPLIT": 256, "E4M3": True},
    "SmolLM2, e5m2": ATTENTION | {"STAGES": 4, "E4M3": False},
}
TREE = {
    "TILE_ROWS": 16, "NUM_KV_HEADS": 8, "GROUP": 4, "HEAD": 128, "PAGE_SIZE": 16, "BLOCK_M": 64, "KEYS": 64,
    "STAGES": 4, "ALL_ROWS": 32, "WARPS": 4, "PDL": False,
}  # fmt: skip
TREES: dict[str, dict[str, Any]] = {
    "8B, few requests": TREE,
    "8B, many requests": TREE | {"TILE_ROWS": 32, "BLOCK_M": 128, "KEYS": 32, "WARPS": 8},
    "8B, 3 stages, page size 64": TREE | {"STAGES": 3, "PAGE_SIZE": 64, "PDL": True},
    "SmolLM2": TREE | {"NUM_KV_HEADS": 3, "GROUP": 3, "HEAD": 64, "ALL_ROWS": 16, "PDL": True},
}


def assembly(module: Any, name: str, constants: dict[str, Any], num_warps: int) -> str:
    """PTX of a kernel in bfloat16, with the alignments that its launch has."""
    text: str = compiled(module, name, constants, num_warps)["ptx"]
    return text


def compiled(module: Any, name: str, constants: dict[str, Any], num_warps: int) -> Any:
    """By the name of the stage: PTX, SASS and others."""
    function = vars(module)[name].compiled
    signature = {argument: type_of(argument, constants) for argument in function.arg_names}
    aligned = [i for i, (argument, kind) in enumerate(signature.items()) if kind == "i32" and "num" not in argument]
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = GluonASTSource(
        function,
        signature,
        constexprs={(function.arg_names.index(key),): value for key, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned + pointers},
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": not constants.get("IN_ORDER", False)}
    return triton.compile(source, target=HOPPER, options=options).asm


def type_of(argument: str, constants: dict[str, Any]) -> str:
    """How a launch passes it."""
    if argument in constants:
        return "constexpr"
    if argument.endswith("_tiles"):
        rows = constants["BLOCK_N" if argument == "w_tiles" else "ROWS"]
        return f"tensordesc<bf16[{rows},{constants['BLOCK_K']}],{NVMMASharedLayout(128, 16, 2)!r}>"
    if argument.endswith("_ptr"):
        return "*fp32" if argument in FLOAT32 else INTEGERS.get(argument, "*bf16")
    return "fp32" if argument in ("eps", "scale_log2", "inverse_k", "inverse_v", "v_scale") else "i32"


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(("inner", "top_k", "stages"), [(768, 8, 5), (512, 6, 4)])
def test_experts_of_one_row(inner: int, top_k: int, stages: int) -> None:
    """Qwen3-30B-A3B's; and a ring that holds all columns, of fewer experts than warps."""
    constants = {"SIZE_K": inner, "TOP_K": top_k, "SHARED": top_k == 6, "WARPS": 8, "BLOCK_K": 128, "STAGES": stages}
    ptx = assembly(sum_of_experts, "_multiply_and_add_kernel", constants | {"PDL": True}, 8)
    assert "mma.sync" in ptx and ".local" not in ptx
    assert ptx.index("cp.async") < ptx.index("griddepcontrol.wait"), "the ring is filled before the wait"


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("name", STREAMED)
def test_streamed_linears(name: str) -> None:
    constants = STREAMED[name]
    ptx = assembly(streamed_linear, "_streamed_linear_kernel", constants, constants["WARPS_K"] * constants["WARPS_N"])
    check(ptx)
    if constants["IN_ORDER"]:
        assert "mul.rn.f32" in ptx and not re.search(r"\s(mul|fma\.rn)\.f32", ptx), "a mean and eps are rounded once"


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("name", TILED)
def test_tiled_linears(name: str) -> None:
    """The copy engine brings the tiles, a warpgroup multiplies, and W is asked for before the wait."""
    constants = TILED[name]
    ptx = assembly(warpgroup_linear, "_warpgroup_linear_kernel", constants, constants["WARPS"])
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx and ".local" not in ptx
    assert 0 < ptx.index("cp.async.bulk.tensor") < ptx.index("griddepcontrol.wait")


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str) -> None:
    """A program of an entry left over waits elsewhere."""
    constants = ATTENTIONS[name]
    ptx = assembly(_decode_attention_gluon, "decode_attention_gluon_kernel", constants, constants["WARPS"])
    check(ptx, waits=1 + constants["UNEVEN"])


@pytest.mark.full_but_every(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_attention_to_8_bits(name: str) -> None:
    """Operands come from shared memory as 16-bit matrices do, and a register is widened by two conversions."""
    constants = EIGHT_BITS[name]
    stages = compiled(_decode_attention_8bit, "decode_attention_8bit_kernel", constants, constants["WARPS"])
    ptx = stages["ptx"]
    check(ptx, waits=1 + constants["UNEVEN"])
    assert conversions_to_8_bits(stages["sass"]) and not torn_conversions(stages["sass"])
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx and "ld.shared.b8" not in ptx
    assert ("cvt.rn.f16x2.e4m3x2" in ptx) == constants["E4M3"]


def test_torn_conversions_are_found() -> None:
    lower = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R30, R30, R85, RZ ;"
    both = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R22, R25.reuse, R84, R30.reuse ;"
    assert not torn_conversions(f"{lower}\n{both}")
    assert torn_conversions(both) == torn_conversions(f"{both}\n{lower}") == [("R22", "R30")]


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_tree_attention(name: str) -> None:
    """A warpgroup multiplies what threads have copied 16 bytes at a time past the registers."""
    constants = TREES[name]
    ptx = assembly(_tree_attention_gluon, "tree_attention_gluon_kernel", constants, constants["WARPS"])
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx and ".local" not in ptx
    assert sizes_of_copies(ptx) == {"0x10"}
    assert ptx.count("griddepcontrol.wait") == constants["PDL"]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "kv_heads"), [(4, 4), (1, 1)])
def test_attention_of_large_heads(width: int, kv_heads: int) -> None:
    """Gemma 4's: 31B with its assistant, and E2B. Two warpgroups multiply, and nothing is spilled."""
    constants = {"WIDTH": width, "NUM_KV_HEADS": kv_heads, "GROUP": 8, "HEAD": 512, "PAIRS": 64, "KEYS": 64}
    constants |= {"PAGE_SIZE": 16, "WARPS": 8, "PDL": True}
    ptx = assembly(large_heads, "large_heads_kernel", constants, 8)
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx and ".local" not in ptx
    assert sizes_of_copies(ptx) == {"0x10"} and ptx.count("griddepcontrol.wait") == 1


def sizes_of_copies(ptx: str) -> set[str]:
    """Bytes of each, as written there."""
    return set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx))


def check(ptx: str, waits: int = 1) -> None:
    """It multiplies on tensor cores, copies 16 bytes at a time past the registers, and waits for the kernel before."""
    assert "mma.sync" in ptx and ptx.count("griddepcontrol.wait") == waits
    assert sizes_of_copies(ptx) == {"0x10"}
    assert ".local" not in ptx

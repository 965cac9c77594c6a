"""The kernels of latent attention compile for Hopper, for rows of 512 + 64 columns, within its shared memory.

The interpreter accepts what the compiler does not. No GPU is needed.
"""

import warnings
from typing import Any

import pytest
import torch
import triton
from overlap_spec_kernels.attention import _latent_attention_kernel, latent_decode, latent_heads, rope_latent_write
from overlap_spec_kernels.attention.latent_attention import UNIT, _Rows, _Tiling, _tiling
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
TYPES = dict.fromkeys(("page_table_ptr", "row_starts_ptr"), "*i32")
TYPES |= dict.fromkeys(("positions_ptr", "prefix_ptr", "extra_rows_ptr", "mask_ptr"), "*i64")
OF_A_MODEL = ("q_ptr", "cache_ptr", "out_ptr", "heads_ptr", "absorbed_ptr", "queries_ptr", "rows_ptr", "weight_ptr")
OF_A_MODEL += "x_ptr", "turned_ptr", "norm_ptr"
FLOATS = ("scale_log2", "v_scale", "inverse_scale", "eps")
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}
BFLOAT, FLOAT, E4M3, E5M2 = NAMES
SHARED = {"HEADS": 20, "RANK": 512, "UNIT": UNIT, "WINDOW": 0, "BLOCK_B": 256, "PDL": True}


def tiling_of(dtype: torch.dtype, pairs: int) -> _Tiling:
    q, nothing = torch.empty(1, 1, 576, dtype=dtype), torch.empty(0)
    return _tiling(_Rows(q, q, 512, nothing, None, nothing), pairs, SHARED_BYTES)


def compiled(
    kernel: Any, constants: dict[str, Any], num_warps: int, stages: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Any:
    function = kernel.compiled
    types = TYPES | dict.fromkeys(OF_A_MODEL, f"*{NAMES[dtype]}") | {"cache_ptr": f"*{NAMES[kv_dtype]}"}
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, "*fp32" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32")
        for name in function.arg_names
    }
    by_place = {(function.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or "stride" in name]
    source = ASTSource(function, signature, by_place, {(i,): [["tt.divisibility", 16]] for i in aligned})
    kernel = triton.compile(source, target=HOPPER, options={"num_warps": num_warps, "num_stages": stages})
    assert kernel.metadata.shared <= SHARED_BYTES and ".local" not in kernel.asm["ptx"]
    return kernel


# Rows times heads of a request; GLM-4.7-Flash has 20 heads, DeepSeek-V2-Lite 16, DeepSeek-V3 128.
CASES = [
    (BFLOAT, BFLOAT, 20, False, True),
    (BFLOAT, BFLOAT, 16, True, True),
    (BFLOAT, E4M3, 20, False, True),
    (FLOAT, FLOAT, 80, False, True),
    (BFLOAT, BFLOAT, 128, False, False),
    (BFLOAT, BFLOAT, 16, False, True),
    (BFLOAT, BFLOAT, 128, True, True),
    (BFLOAT, E5M2, 80, True, True),
    (FLOAT, E4M3, 80, True, True),
    (FLOAT, FLOAT, 80, False, False),
]


@pytest.mark.full_but_every(6)
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_dtype", "pairs", "tree", "uniform"), CASES)
def test_attention(dtype: torch.dtype, kv_dtype: torch.dtype, pairs: int, tree: bool, uniform: bool) -> None:
    """Tensor cores take 16-bit keys from shared memory, where copies bring them while others are multiplied."""
    tiling = tiling_of(dtype, pairs)
    constants = SHARED | {
        "ROPE": 64, "PAGE_SIZE": 16, "TREE": tree, "UNIFORM": uniform, "IN_PARTS": dtype == FLOAT,
        "BLOCK_H": tiling.block_h, "BLOCK_N": tiling.block_n, "BLOCK_R": tiling.block_r,
        "BLOCK_T": tiling.block_t,
    }  # fmt: skip
    kernel = _latent_attention_kernel.latent_attention_kernel
    ptx = compiled(kernel, constants, 8, tiling.stages, dtype, kv_dtype).asm["ptx"]
    if dtype == BFLOAT:
        assert "wgmma" in ptx and "mma.sync" not in ptx
        assert (ptx.count("cp.async.cg.shared.global") >= 32) == (kv_dtype == dtype)
        assert tiling.stages == 2 and tiling.block_h >= min(pairs, 64)
    else:
        assert "tf32" not in ptx and tiling.block_h == 16


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [True, False])
def test_adding_pieces(uniform: bool) -> None:
    constants = SHARED | {
        "TREE": False, "UNIFORM": uniform, "BLOCK_H": 32, "BLOCK_C": 128, "AT_ONCE": 16,
    }  # fmt: skip
    compiled(_latent_attention_kernel.add_pieces_kernel, constants, 1, 2, BFLOAT, BFLOAT)


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("heads", "width", "padded"), [(20, 1, 24), (20, 4, 80)])
def test_windows_of_decode(heads: int, width: int, padded: int) -> None:
    """No product waits for another one."""
    division = (f"WIDTH={width}", f"HEADS={heads}", f"UNIT={UNIT}", "READ_BEFORE_WAIT=1")
    kernels = latent_decode._attention(division, 16, padded), latent_decode._addition(division, padded, 160)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(kernel._code._compile() for kernel in kernels)


@pytest.mark.parametrize(("kv_dtype", "paged"), [(BFLOAT, True), (E4M3, False)])
def test_writing_rows(kv_dtype: torch.dtype, paged: bool) -> None:
    constants = {
        "PAGE_SIZE": 16,
        "PAGED": paged,
        "RANK": 512,
        "HALF": 32,
        "BLOCK_R": 512,
        "BLOCK_HALF": 32,
        "BLOCK_HEADS": 8,
        "PDL": True,
    }
    TYPES["places_ptr"] = "*i32" if paged else "*i64"
    compiled(rope_latent_write._rope_latent_write_kernel, constants, 4, 2, BFLOAT, kv_dtype)


@pytest.mark.parametrize("interleaved", [True, False])
def test_putting_heads_together(interleaved: bool) -> None:
    constants = {
        "RANK": 512, "ROPE": 64, "INTERLEAVED": interleaved, "BLOCK_R": 512, "BLOCK_T": 64, "BLOCK_HEADS": 4,
        "PDL": True,
    }  # fmt: skip
    compiled(latent_heads._latent_heads_kernel, constants, 4, 2, BFLOAT, BFLOAT)


@pytest.mark.parametrize(("size_k", "size_n", "rope", "warps"), [(192, 512, 64, 4), (512, 256, 0, 8)])
def test_products_of_few_rows(size_k: int, size_n: int, rope: int, warps: int) -> None:
    """All of K of a program's columns is in shared memory before it waits for the kernel before it."""
    constants = {
        "SIZE_K": size_k, "SIZE_N": size_n, "ROPE": rope, "INTERLEAVED": True, "BLOCK_M": 16, "BLOCK_N": 64,
        "BLOCK_K": 256 if rope else 512, "BLOCK_R": 512, "BLOCK_T": max(rope, 1), "PDL": True,
    }  # fmt: skip
    ptx = compiled(latent_heads._held_heads_kernel, constants, warps, 3, BFLOAT, BFLOAT).asm["ptx"]
    products = ptx[ptx.rindex("griddepcontrol.wait") :]
    assert products.count("mma.sync") == max(64 // 8 // warps, 1) * constants["BLOCK_K"] // 16
    before = ptx[: -len(products)]
    assert before.count("st.shared.v4") == constants["BLOCK_K"] * 64 // 8 // (32 * warps)

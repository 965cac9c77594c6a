"""The kernels of recurrent layers compile for Hopper, at the sizes of Qwen3-Next and Granite 4. No GPU is needed."""

import re
from typing import Any

import pytest
import triton
from overlap_spec_kernels.launch import GluonKernel
from overlap_spec_kernels.recurrent import gated_delta, prompt_chunks, replay
from overlap_spec_kernels.recurrent.row import ADDS_UP, COLUMNS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

HOPPER = GPUTarget("cuda", 90, 32)
I64 = ("slots_ptr", "positions_ptr", "position_ptr", "counts_ptr", "drawn_ptr")
FLOAT = ("memory_ptr", "steepness_ptr", "offset_ptr", "norm_ptr", "skip_ptr", "rates_ptr", "decays_ptr", "scale", "eps")
REPLAYED = dict.fromkeys(("queries_ptr", "keys_ptr", "values_ptr"), "*fp32")
SIZES = {
    "C": 8192,
    "K": 4,
    "N": 32,
    "M": 16,
    "DK": 128,
    "DV": 128,
    "BLOCK_K": 128,
    "G": 2,
    "APART": True,
    "bias_ptr": None,
    "skip_ptr": None,
    "EPS": 1e-6,
    "PDL": True,
    "L": 64,
    "B": 16,
    "THREADS": 8,
    "VALUES": 4,
}
# Of Granite-4.0-H-Small; it has a bias and a D.
MAMBA = {"C": 8448, "N": 128, "M": 1, "DV": 64, "G": 1, "APART": False}
OF_MAMBA = {name: value for name, value in SIZES.items() if not name.endswith("_ptr")} | MAMBA
MAMBA_FINISHES = {"BLOCK_H": 128, "BLOCK_V": 64, "BLOCK_W": 4, "BLOCK": 128}
FINISHES = {"BLOCK_H": 4, "BLOCK_V": 128, "BLOCK_W": 4, "BLOCK": 128}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {
    "window": (gated_delta._recur_kernel, {"BLOCK_V": COLUMNS}, ADDS_UP),
    "end of a window": (gated_delta._finish_kernel, FINISHES | {"IS_WINDOW": True}, {}),
    "end of a prompt": (gated_delta._finish_kernel, FINISHES | {"IS_WINDOW": False}, {}),
    "convolution": (prompt_chunks._convolve_kernel, {"ROWS": 8 * prompt_chunks._RUN, "RUN": prompt_chunks._RUN}, {}),
    "chunks alone": (prompt_chunks._prepare_kernel, {"EXACT": "tf32"}, {}),
    "chunks": (prompt_chunks._chunks_kernel, {"BLOCK_V": prompt_chunks._COLUMNS, "EXACT": "tf32"}, {}),
    "rows of output": (replay._prepare_kernel, {"BLOCK_V": SIZES["DV"]}, ADDS_UP),
    "output": (replay._replay_kernel, {}, ADDS_UP),
}
MAMBA_CASES: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {
    "window": (gated_delta._recur_kernel, {"BLOCK_V": COLUMNS}, ADDS_UP),
    "end of a window": (gated_delta._finish_kernel, MAMBA_FINISHES | {"IS_WINDOW": True}, {}),
    "convolution": (prompt_chunks._convolve_kernel, {"ROWS": 8 * prompt_chunks._RUN, "RUN": prompt_chunks._RUN}, {}),
    "chunks alone": (prompt_chunks._prepare_kernel, {"EXACT": "tf32"}, {}),
    "chunks": (prompt_chunks._chunks_kernel, {"BLOCK_V": prompt_chunks._COLUMNS, "EXACT": "tf32"}, {}),
    "rows of output": (replay._prepare_kernel, {"BLOCK_V": MAMBA["DV"]}, ADDS_UP),
    "output": (replay._replay_kernel, {}, ADDS_UP),
}


def compiled(
    kernel: Any, constants: dict[str, Any], other: str = "*bf16", memory: str = "*fp32", **options: int
) -> Any:
    """`other`: pointers that have no type of their own."""
    function = kernel.compiled
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types = dict.fromkeys(I64, "*i64") | {name: "*fp32" if name.endswith("_ptr") else "fp32" for name in FLOAT}
    types["memory_ptr"] = memory
    types |= REPLAYED if "drawn_ptr" in function.arg_names else {}
    types["starts_ptr"] = "*i64" if constants.get("IS_WINDOW") or kernel is gated_delta._recur_kernel else "*i32"
    signature = {
        name: "constexpr" if name in constants else types.get(name, other if name.endswith("_ptr") else "i32")
        for name in function.arg_names
    }
    by_place = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource if isinstance(kernel, GluonKernel) else ASTSource
    # Places where Triton finds that tensors begin at multiples of 16 bytes.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(function.arg_names)
        if name.endswith("_ptr") and name not in constants
    }
    return triton.compile(source(function, signature, by_place, aligned), target=HOPPER, options=options)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_of_states_fits_into_shared_memory(dtype: str) -> None:
    kernel, constants, _ = CASES["chunks"]
    stages = prompt_chunks._STAGES[2 if dtype == "bf16" else 4]
    exact = {"EXACT": "tf32" if dtype == "bf16" else "tf32x3"}
    found = compiled(kernel, SIZES | constants | exact, f"*{dtype}", num_stages=stages, num_warps=4)
    assert 0 < found.metadata.shared <= 232448


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile(case: str) -> None:
    kernel, constants, options = CASES[case]
    found = compiled(kernel, SIZES | constants, num_stages=1, **options)
    assert ".local" not in found.asm["ptx"]
    assert ("wgmma" in found.asm["ptx"]) == ("chunks" in case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MAMBA_CASES)
def test_kernels_of_mamba2_compile(case: str) -> None:
    kernel, constants, options = MAMBA_CASES[case]
    found = compiled(kernel, OF_MAMBA | constants, num_stages=1, **options)
    assert ".local" not in found.asm["ptx"]
    assert ("wgmma" in found.asm["ptx"]) == ("chunks" in case)


@pytest.mark.slow_but_every(12)
@pytest.mark.parametrize("keys", [128, *(size for size in replay._KEYS if size != 128)])
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
@pytest.mark.parametrize("gates", [2, 1], ids=["gated delta", "mamba 2"])
def test_output_is_added_up_as_windows_are(gates: int, stored: str, keys: int) -> None:
    """As many threads share a length, or what a column of a state finds, each with as many numbers of it."""
    threads = 8 if stored == "fp32" else 16
    sizes = SIZES if gates == 2 else OF_MAMBA
    sizes = sizes | {"THREADS": threads, "VALUES": 32 // threads, "DK": keys, "BLOCK_K": keys}
    of_kernels = (
        (gated_delta._recur_kernel, COLUMNS),
        (replay._prepare_kernel, sizes["DV"]),
        (replay._replay_kernel, 0),
    )
    texts = [
        compiled(kernel, sizes | {"BLOCK_V": block}, memory=f"*{stored}", **ADDS_UP).asm for kernel, block in of_kernels
    ]
    assert not any("fma.rn.f32" in text["ptx"] for text in texts), "of two products one is not rounded"
    window, prepared, loop = (reductions(text["ttgir"]) for text in texts)
    assert window == (prepared if gates == 2 else []) + loop and len(loop) == gates


def reductions(ir: str) -> list[tuple[int, int, int]]:
    """Of each sum over an axis: threads that share it, numbers of it that one of them has, and how many side by side.

    Those of a state stand where a kernel has put them: 1.
    """
    layouts = {
        name: [[int(each) for each in part.split(",")] for part in parts]
        for name, *parts in re.findall(
            r"(#blocked\d*) = #ttg.blocked<{sizePerThread = \[(.*?)\], threadsPerWarp = \[(.*?)\]", ir
        )
    }
    found = []
    for shape, layout in re.findall(r"}\) : \(tensor<(\d+(?:x\d+)*)xf32, (#blocked\d*)>\) ->", ir):
        (together, *others), (threads, *_) = layouts[layout]
        found.append((threads, int(shape.split("x")[0]) // threads, 1 if others else together))
    return found


def test_plain_and_drafted_steps_run_one_binary() -> None:
    """A width of 1 would else be a constant, with which a compiler may add up in another order."""
    for kernel in (gated_delta._recur_kernel, gated_delta._finish_kernel):
        unspecialised = {each.name for each in kernel.compiled.params if each.do_not_specialize}
        assert unspecialised >= {"width", "most"}

"""Reductions between GPUs compile for Hopper, as they are launched; no GPU is needed."""

import re

import pytest
from overlap_spec_kernels import all_reduce

triton = pytest.importorskip("triton", reason="Triton's wheels are for Linux: pip install triton")
BLOCKS = {"_one_shot_add_kernel": (1024, 4)}  # elements of a program, and its warps
OF_DTYPE = ("part_ptr", "out_ptr", "residual_ptr", "norm_ptr", "weighted_ptr")
WAITS = {"_one_shot_kernel": 1, "_one_shot_add_kernel": 1, "_two_shot_kernel": 2, "_gather_kernel": 1}


def assembly(name: str, dtype: str, ranks: int) -> str:
    function = vars(all_reduce)[name].compiled
    block, num_warps = BLOCKS.get(name, (2048, 8))
    types = dict.fromkeys(OF_DTYPE, f"*{dtype}") | {"squares_ptr": "*fp32"}
    signature = {key: types.get(key, "*i64" if key.endswith("_ptr") else "i32") for key in function.arg_names}
    constants = {"PROGRAMS": all_reduce.PROGRAMS, "BLOCK": block, "RANKS": ranks}
    if "PDL" in function.arg_names:
        constants["PDL"] = True
    signature |= dict.fromkeys(constants, "constexpr")
    sizes = ("capacity", "count", "size", "columns", "residual_stride")
    aligned = (*OF_DTYPE, "addresses_ptr", "epochs_ptr", *sizes)
    source = triton.compiler.ASTSource(
        function,
        signature,
        constexprs={(function.arg_names.index(key),): value for key, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, key in enumerate(signature) if key in aligned},
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    text: str = triton.compile(source, target=target, options={"num_warps": num_warps}).asm["ptx"]
    return text


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", WAITS)
def test_reductions(name: str, dtype: str, ranks: int) -> None:
    """Operands move 16 bytes at a time; each signal is a release, each wait an acquire, of the whole system."""
    ptx = assembly(name, dtype, ranks)
    signals = re.findall(r"atom\S*\.sys\S*\.release\S*\.exch\.b64|atom\S*\.release\S*\.sys\S*\.exch\.b64", ptx)
    assert len(signals) == ranks * WAITS[name]
    looks = re.findall(r"(?:ld|atom)\S*(?:sys\S*acquire|acquire\S*sys)\S*", ptx)
    assert len(looks) == 2 * ranks * WAITS[name], "a look, and those of the loop that waits"
    operands = re.findall(r"ld\.global\.cg\S*", ptx)
    assert operands and set(operands) == {"ld.global.cg.v4.b32"}
    assert "multimem" not in ptx and ".local" not in ptx


@pytest.mark.parametrize("name", ["_one_shot_kernel", "_one_shot_add_kernel", "_gather_kernel"])
def test_a_dependent_launch_waits_before_it_touches_memory(name: str) -> None:
    """Until then the sum before it may still read the place that this one writes."""
    ptx = assembly(name, "bf16", 2)
    wait = ptx.index("griddepcontrol.wait")
    assert ptx.index("griddepcontrol.launch_dependents") < wait
    assert not re.search(r"(?:ld|st|atom)\.(?:relaxed\.)?global", ptx[:wait])


def test_operands_are_written_before_the_signal() -> None:
    ptx = assembly("_one_shot_kernel", "bf16", 2)
    written, signal = ptx.index("st.global.v4"), ptx.index("exch.b64")
    assert written < ptx.rindex("bar.sync", 0, signal) < signal < ptx.index("ld.global.cg")

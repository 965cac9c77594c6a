"""`copy_out` copies integers, and refuses what is none of them; the kernel compiles for Hopper."""

import pytest
import torch
from overlap_spec_kernels import copy_out


def test_the_reference_copies() -> None:
    source, out = torch.arange(12).view(3, 4), torch.zeros(3, 4, dtype=torch.int64)
    copy_out(source, out)
    assert torch.equal(out, source)


def test_wrong_arguments_are_named() -> None:
    rows = torch.zeros(3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="source"):
        copy_out(rows.int(), rows)
    with pytest.raises(ValueError, match="source"):
        copy_out(rows[:, :2], rows[:, 2:].contiguous())
    with pytest.raises(ValueError, match="out"):
        copy_out(rows, rows[:2])


def test_the_kernel_compiles_for_hopper() -> None:
    triton = pytest.importorskip("triton", reason="Triton's wheels are for Linux: pip install triton")
    from overlap_spec_kernels.window.copy_out import _copy_out_kernel

    function = _copy_out_kernel.compiled
    signature = {"source_ptr": "*i64", "out_ptr": "*i64", "count": "i32", "BLOCK": "constexpr"}
    source = triton.compiler.ASTSource(function, signature, {(function.arg_names.index("BLOCK"),): 512})
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    assert "st.global" in triton.compile(source, target=target, options={"num_warps": 4}).asm["ptx"]

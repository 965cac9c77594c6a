"""The C++ kernel of weights in few bits against its reference and float64, and its compilation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from overlap_spec_kernels import (
    NO_TOKEN,
    GroupedKernel,
    GroupedPart,
    GroupedWeight,
    NoLibraryError,
    fused_linear,
    linear_argmax,
)
from overlap_spec_kernels.compiled_cpu import compiled_library
from overlap_spec_kernels.linear.grouped import grouped_linear_reference
from support.tiny.grouped import grouped_kernel, grouped_kernel_of_avx2

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 21)


def part(num_rows: int, size_k: int, bits: int, group: int, offsets: bool, seed: int) -> GroupedPart:
    """Random; scales of groups of 16 are not exact in 16 bits, others are."""
    random = torch.Generator().manual_seed(seed)
    if bits >= 16:
        values = torch.randn(num_rows, size_k, generator=random)
        return GroupedPart.packed(values.bfloat16() if bits == 16 else values, None, None, bits, 0, True)
    least, most = (-8, 7) if bits == 4 else (-128, 127)
    values = torch.randint(least, most + 1, (num_rows, size_k), generator=random, dtype=torch.int8)
    scales, shifts = torch.randn(2, num_rows, size_k // group, generator=random)
    if group == 32:
        scales, shifts = scales.half().float(), shifts.half().float()
    return GroupedPart.packed(values, scales, shifts if offsets else None, bits, least, True)


CASES = {
    "4 bits": [part(128, 64, 4, 32, False, 1)],
    "4 bits, offsets, groups of 16": [part(192, 96, 4, 16, True, 2)],
    "8 bits": [part(128, 64, 8, 32, False, 3)],
    "8 bits, offsets, groups of 16": [part(256, 48, 8, 16, True, 4)],
    "bfloat16": [part(128, 72, 16, 0, False, 5)],
    "float32": [part(128, 72, 32, 0, False, 10)],
    "few rows": [part(5, 32, 4, 32, True, 6)],
    "a mixture": [part(40, 64, 4, 32, True, 7), part(24, 64, 8, 16, False, 8), part(64, 64, 8, 32, True, 9)],
}


@pytest.fixture(params=(grouped_kernel, grouped_kernel_of_avx2), ids=("this processor", "AVX2"))
def kernel(request: pytest.FixtureRequest) -> GroupedKernel:
    return request.param()


@pytest.mark.parametrize("case", CASES)
def test_product_and_gate(case: str, kernel: GroupedKernel) -> None:
    weight = GroupedWeight(tuple(CASES[case]), _columns(CASES[case]), kernel)
    wide = torch.cat([each.dequantised() for each in weight.parts]).double()
    whole = torch.randn(max(ROWS), weight.size_k + 8)[:, : weight.size_k]
    everything = fused_linear(whole, weight)
    for num_rows in ROWS:
        x = whole[:num_rows]
        y, expected = fused_linear(x, weight), x.double() @ wide.t()
        torch.testing.assert_close(y.double(), expected, atol=2e-6 * float(expected.abs().max()), rtol=0)
        assert torch.equal(y, everything[:num_rows]), "a row does not depend on the others, to the bit"
        torch.testing.assert_close(y, grouped_linear_reference(x, weight), atol=1e-3, rtol=1e-4)
        if len(wide) % 2 == 0:
            gate, up = expected.chunk(2, dim=1)
            gated = torch.nn.functional.silu(gate) * up
            found = fused_linear(x, weight, gated=True).double()
            torch.testing.assert_close(found, gated, atol=4e-6 * float(expected.abs().max()) ** 2, rtol=0)


@pytest.mark.parametrize("case", ["4 bits", "4 bits, offsets, groups of 16", "8 bits"])
def test_groups_of_any_size(case: str, kernel: GroupedKernel) -> None:
    """Each group of x has a scale of its own: what is tiny is lost only beside what is large in the same group."""
    weight = GroupedWeight(tuple(CASES[case]), _columns(CASES[case]), kernel)
    wide = torch.cat([each.dequantised() for each in weight.parts]).double()
    for size in (0.0, 1e-40, 1e-30, 1e-8, 1.0, 1e20):
        x = size * torch.randn(2, weight.size_k)
        x[:, :16] = 0.0
        x[1, 32:48] *= 1e-9
        expected = x.double() @ wide.t()
        error = (fused_linear(x, weight).double() - expected).abs().max()
        assert error <= 2e-6 * float(expected.abs().max()) + 1e-32


@pytest.mark.parametrize("num_rows", [1, 4, 11])
def test_largest_columns(num_rows: int) -> None:
    weight = GroupedWeight((part(200, 64, 8, 32, False, 3),), 64, grouped_kernel())
    x, ids = torch.randn(num_rows, 64), torch.randperm(200)
    expected = fused_linear(x, weight).argmax(1)
    assert torch.equal(linear_argmax(x, weight), expected)
    assert torch.equal(linear_argmax(x, weight, ids), ids[expected])


@pytest.mark.parametrize("columns", [(3, 4), (5, 70), (17, 18, 65), (130, 199)])
def test_of_equal_columns_the_first(columns: tuple[int, ...]) -> None:
    values = torch.zeros(200, 32, dtype=torch.int8)
    values[list(columns)] = 3
    weight = GroupedWeight((GroupedPart.packed(values, torch.ones(200, 1), None, 8, 0, True),), 32, grouped_kernel())
    assert linear_argmax(torch.ones(1, 32), weight).tolist() == [columns[0]]
    assert linear_argmax(-torch.ones(1, 32), weight).tolist() == [0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("case", ["4 bits", "8 bits", "bfloat16"])
def test_what_is_not_finite_has_no_largest_column(case: str, bad: float) -> None:
    weight = GroupedWeight(tuple(CASES[case]), _columns(CASES[case]), grouped_kernel())
    x = torch.randn(3, weight.size_k)
    expected = linear_argmax(x, weight)
    x[1, 7] = bad
    assert linear_argmax(x, weight).tolist() == [int(expected[0]), NO_TOKEN, int(expected[2])]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_finite_stays_so(bits: int, bad: float) -> None:
    """However small the weights are."""
    values = torch.full((64, 32), -3, dtype=torch.int8)
    weight = GroupedWeight(
        (GroupedPart.packed(values, torch.full((64, 1), 1e-36), None, bits, -8, False),), 32, grouped_kernel()
    )
    x = torch.randn(2, 32)
    x[1, 5] = bad
    assert fused_linear(x, weight).isfinite().all(1).tolist() == [True, False]


def _columns(parts: list[GroupedPart]) -> int:
    return parts[0].unpacked()[0].shape[1]


@pytest.mark.parametrize("value", [0.0, -0.0, 3e-5, -1.0, 20.0, -20.0, 88.0, -88.0, -120.0, 1e4, -1e4])
def test_gate_of_any_size(value: float) -> None:
    values = torch.zeros(128, 8)
    values[:, 0] = 1.0
    weight = GroupedWeight((GroupedPart.packed(values.bfloat16(), None, None, 16, 0, True),), 8, grouped_kernel())
    x = torch.tensor([[value] + 7 * [0.0]])
    expected = torch.nn.functional.silu(x[0, 0].double()) * value
    found = fused_linear(x, weight, gated=True)[0, 0].double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-29)


@pytest.mark.parametrize("case", [name for name in CASES if name != "a mixture"])
def test_packing_loses_nothing(case: str) -> None:
    (packed,) = CASES[case]
    values, scales, offsets = packed.unpacked()
    again = GroupedPart.packed(values, scales, offsets, packed.bits, packed.least, False)
    assert torch.equal(again.dequantised(), packed.dequantised())
    ids = torch.tensor([3, 0, 4])
    assert torch.equal(packed.rows(ids).dequantised(), packed.dequantised()[ids])
    half = packed.scales is not None and packed.scales.dtype == torch.float16
    assert half == (packed.group == 32), "16 bits where they are exact"


def test_what_cannot_be_multiplied_is_refused() -> None:
    weight = GroupedWeight(tuple(CASES["4 bits"]), 64, None)
    with pytest.raises(ValueError, match="weight"):
        fused_linear(torch.zeros(1, 32), weight)
    with pytest.raises(ValueError, match="x"):
        fused_linear(torch.zeros(1, 64, dtype=torch.float64), weight)


def test_without_a_compiler_there_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int broken(")
    with pytest.raises(NoLibraryError, match="failed: .*broken.cpp"):
        compiled_library(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir()), "nothing is left of it"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoLibraryError, match=r"no C\+\+ compiler"):
        compiled_library(source, tmp_path / "cache")


def test_a_library_is_compiled_once(tmp_path: Path) -> None:
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    assert compiled_library(source, tmp_path).seven() == 7
    (built,) = tmp_path.glob("*.so")
    written: Any = built.stat().st_mtime_ns
    assert compiled_library(source, tmp_path).seven() == 7 and built.stat().st_mtime_ns == written
    source.write_text('extern "C" int seven() { return 8; }')
    assert compiled_library(source, tmp_path).seven() == 8, "another source is another library"
    (tmp_path / "small.h").write_text("#define SEVEN 7")
    source.write_text('#include "small.h"\nextern "C" int seven() { return SEVEN; }')
    assert compiled_library(source, tmp_path).seven() == 7
    (tmp_path / "small.h").write_text("#define SEVEN 9")
    assert compiled_library(source, tmp_path).seven() == 9, "so is another header"

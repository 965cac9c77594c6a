"""Which maps of many rows go to the kernel in CUDA C++, and that it compiles; no GPU is needed."""

import pytest
import torch
from overlap_spec_kernels import nvrtc as _cuda
from overlap_spec_kernels.linear import dense, wide_linear as wide
from torch import Tensor

LLAMA_8B = {"gate and up": (28672, 4096), "head": (128256, 4096)}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200, which has 132 multiprocessors."""
    monkeypatch.setattr(wide, "runs_hopper", lambda device: True)
    monkeypatch.setattr(wide, "num_multiprocessors", lambda device: 132)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def taken(rows: int, name: str) -> bool:
    weight, gated = meta(*LLAMA_8B[name]), name != "head"
    x = meta(rows, weight.shape[1])
    cut = wide.wide_for(x, weight, gated)
    assert cut is not None
    return cut.is_full(x, weight, gated)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", LLAMA_8B)
def test_where_tiles_are_full(name: str) -> None:
    """Nearly, where a BLAS needs one kernel more; two thirds of an argmax's, for which it writes all logits."""
    found = [rows for rows in (129, 192, 256, 288, 384, 512, 640, 768, 1024) if taken(rows, name)]
    whole = [256, 384, 512, 640, 768, 1024]
    assert found == ([192, 256, 288, *whole[1:]] if name == "head" else whole)


@pytest.mark.usefixtures("hopper")
def test_the_argmax_of_fewer_columns_has_narrower_tiles() -> None:
    """A draft's 32,000 fill three rounds of 176 columns. Of any number of rows: one kernel for each weight."""
    x, draft, head = meta(256, 4096), meta(32000, 4096), meta(128256, 4096)
    assert [wide.wide_for(x, weight, False) for weight in (draft, head)] == [wide.ARGMAX[1], wide.ARGMAX[0]]
    assert wide.wide_for(meta(1024, 4096), draft, False) == wide.ARGMAX[1]
    assert wide.ARGMAX[1].is_full(meta(192, 4096), draft, False)


@pytest.mark.usefixtures("hopper")
def test_what_the_kernel_cannot_do() -> None:
    x, weight = meta(256, 4096), meta(28672, 4096)
    assert wide.wide_for(x, weight, True) is not None
    assert wide.wide_for(x.float(), weight.float(), True) is None
    assert wide.wide_for(meta(256, 4100)[:, :4096], weight, True) is None  # rows of x that are not 16-byte spaced
    assert wide.wide_for(meta(256, 4096 + 32), meta(28672, 4096 + 32), True) is None
    assert wide.wide_for(meta(256, 576), meta(3072, 576), True) is None  # a small weight


def test_nothing_without_a_hopper_gpu() -> None:
    assert not _cuda.runs_hopper(torch.device("cpu"))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("end", ["GATED", "ARGMAX", "PLAIN"])
def test_it_compiles(end: str, dtype: torch.dtype) -> None:
    defines = "COLUMNS=224" if end != "PLAIN" else "COLUMNS=256", "STAGES=4", "PARTS=1", end, "SCALED"
    headers = (("wgmma.h", wide.wgmma_header(256 if end == "PLAIN" else 224, dtype)),)
    assert _cuda.CudaCode(wide.SOURCE, defines, headers).compiled().startswith(b"\x7fELF")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("rows", "columns"), [(384, (96, 128, 160)), (512, (96, 128, 192)), (600, (96, 160, 160))])
def test_tiles_fill_rounds(rows: int, columns: tuple[int, ...]) -> None:
    """Of an odd number of tiles of x the last one is no half of a pair. Qwen3.5-9B's gate, down and projections."""
    shapes = ((24576, 4096, True), (4096, 12288, False), (12288, 4096, False))
    found = [wide.any_for(meta(rows, size_k), meta(size_n, size_k), gated) for size_n, size_k, gated in shapes]
    assert tuple(cut.block_n for cut in found) == columns


def test_bands_have_about_2048_rows() -> None:
    assert [wide._num_bands(rows // 128) for rows in (128, 2048, 3072, 4096, 6400, 8192)] == [1, 1, 2, 2, 3, 4]


@pytest.mark.usefixtures("hopper")
def test_gates_without_an_order_have_tiles_that_fill_rounds() -> None:
    """Qwen3.5-9B's: of 96 columns where those of 112 leave a part of a round."""
    weight = meta(24576, 4096)
    found = [wide.wide_for(meta(rows, 4096), weight, True) for rows in (384, 768, 2048, 3072)]
    assert found == [wide.GATES[0], wide.GATED, wide.GATES[0], wide.GATED]
    for rows, cut in zip((384, 768, 2048, 3072), found, strict=True):
        assert cut is not None and cut.is_full(meta(rows, 4096), weight, True)
        assert wide.GATED.is_full(meta(rows, 4096), weight, True) == (cut == wide.GATED)


@pytest.mark.usefixtures("hopper")
def test_what_other_numbers_of_rows_take_is_loaded_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(_cuda.CudaKernel, "load", lambda kernel: loaded.append(kernel._code.defines[0]))
    assert dense._wide_cut(meta(129, 4096), meta(*LLAMA_8B["gate and up"]), True) is None
    assert loaded == ["COLUMNS=192", "COLUMNS=224"]

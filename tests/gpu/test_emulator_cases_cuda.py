"""The small kernels that test the emulator of CUDA C++ give the same on a GPU."""

from __future__ import annotations

import pytest
import torch
from emulators.cases import CASES, HEADERS, AcrossRows, Work
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, box_map, runs_hopper, tensor_map
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(
        not (torch.cuda.is_available() and runs_hopper(torch.device("cuda"))),
        reason="the kernels are for Hopper (sm_90a), as those that run in the emulator",
    ),
    pytest.mark.xdist_group("emulator"),
    pytest.mark.filterwarnings("ignore:.*serialized:RuntimeWarning"),  # products under a condition, for a fault
]
BFLOAT, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(scope="module")
def code() -> CudaCode:
    return CudaCode(CASES, (), tuple(HEADERS.items()))


def run(code: CudaCode, name: str, threads: int, x: Tensor, w: Tensor, out: int, programs: int = 1) -> Tensor:
    x, w, result = x.cuda(), w.cuda(), torch.full((out,), torch.nan, device="cuda")
    work = Work(x.data_ptr(), w.data_ptr(), result.data_ptr(), x.shape[0], 0)
    maps = (tensor_map(w, 16, 64),) if name == "register_products" else ()
    if name == "products_across_rows":
        maps = (box_map(AcrossRows.in_boxes(w), AcrossRows.box),)
    CudaKernel(code, name, threads, 8192).launch(programs, (*maps, work))
    return result.cpu()


def test_ring(code: CudaCode) -> None:
    x = torch.randint(-8, 9, (11, 128)).float()
    assert torch.equal(run(code, "ring", 160, x, x, 129), torch.cat((x.sum(0), x.sum()[None])))


def test_cluster(code: CudaCode) -> None:
    x = torch.randint(-8, 9, (4, 32)).float()
    expected = torch.cat((x.sum(0), x.sum(0), x.flatten()))
    assert torch.equal(run(code, "cluster_sums", 32, x, x, 192, programs=4), expected)


def test_products_from_registers(code: CudaCode) -> None:
    x, w = torch.randint(-8, 9, (64, 64)).to(BFLOAT), torch.randint(-8, 9, (16, 64)).to(BFLOAT)
    out = run(code, "register_products", 128, x, w, 1024)
    assert torch.equal(out.view(64, 16), x.float() @ w.float().t())


def test_fragments(code: CudaCode) -> None:
    x, w = torch.randint(-8, 9, (16, 16)).to(BFLOAT), torch.randint(-8, 9, (8, 16)).to(BFLOAT)
    expected = (x.float() @ w.float().t()).flatten()
    assert torch.equal(run(code, "fragments", 32, x, w, 512), torch.cat((expected, expected, torch.ones(256))))
    x, w = (torch.randint(-8, 9, (rows, 32)).to(FLOAT8) for rows in (16, 8))
    assert torch.equal(run(code, "fragments_8_bits", 32, x, w, 128).view(16, 8), x.float() @ w.float().t())


def test_products_read_across_rows(code: CudaCode) -> None:
    given = AcrossRows()
    out = run(code, "products_across_rows", 128, given.x, given.w, 64 * 128)
    assert torch.equal(out.view(64, 128), given.expected)

"""The emulator of CUDA C++: small kernels compute what they should, in any order, and each planted fault is found."""

from __future__ import annotations

from enum import IntEnum

import pytest
import torch
from emulators.cases import CASES, HEADERS, AcrossRows, Work
from emulators.cuda import CudaEmulator, EmulatorError, Kernel, guarded, tensor_map
from emulators.cuda.launch import box_map
from emulators.cuda.translate import kernels, translated
from overlap_spec_kernels.linear.wide_linear import SOURCE as WIDE_LINEAR
from overlap_spec_kernels.nvrtc import SHARED_SOURCES
from torch import Tensor

BFLOAT = torch.bfloat16


class Cases:
    """The kernels of cases.cu as functions of tensors."""

    def __init__(self, emulator: CudaEmulator) -> None:
        self._code = emulator.code(CASES, headers=HEADERS)

    def run(self, name: str, threads: int, x: Tensor, w: Tensor, out: int, *, fault: int = 0, seed: int = 0) -> Tensor:
        result = guarded(torch.full((out,), torch.nan))
        x, w = guarded(x), guarded(w)
        work = Work(x.data_ptr(), w.data_ptr(), result.data_ptr(), x.shape[0], fault)
        kernel = Kernel(self._code, name)
        maps = (tensor_map(w, 16, 64),) if name == "register_products" else ()
        programs = 4 if name == "cluster_sums" else 1
        if name == "products_across_rows":
            maps = (box_map(AcrossRows.in_boxes(w), AcrossRows.box),)
        late = [x] if name == "ring" else []
        shared = 8192
        kernel.launch(programs, threads, shared, (*maps, work), seed=seed, written_before=late)
        return result

    def ring(self, fault: int, seed: int) -> None:
        x = torch.randint(-8, 9, (11, 128)).float()
        expected = torch.cat((x.sum(0), x.sum()[None]))
        assert torch.equal(self.run("ring", 160, x.clone(), x, 129, fault=fault, seed=seed), expected)

    def cluster(self, fault: int, seed: int) -> None:
        x = torch.randint(-8, 9, (4, 32)).float()
        expected = torch.cat((x.sum(0), x.sum(0), x.flatten()))
        assert torch.equal(self.run("cluster_sums", 32, x, x, 192, fault=fault, seed=seed), expected)

    def products(self, fault: int, seed: int) -> None:
        x, w = torch.randint(-8, 9, (64, 64)).to(BFLOAT), torch.randint(-8, 9, (16, 64)).to(BFLOAT)
        out = self.run("register_products", 128, x, w, 1024, fault=fault, seed=seed)
        assert torch.equal(out.view(64, 16), x.float() @ w.float().t())


@pytest.fixture
def cases(cuda_emulator: CudaEmulator) -> Cases:
    return Cases(cuda_emulator)


class Ring(IntEnum):
    """`RingFault` of cases.cu."""

    NO_FULL_WAIT = 1
    NO_EMPTY_WAIT = 2
    WRONG_FULL_PARITY = 3
    WRONG_EMPTY_PARITY = 4
    FEWER_BYTES = 5
    MORE_BYTES = 6
    EARLY_ARRIVAL = 7
    NO_SYNCWARP = 8
    NO_BARRIER_AFTER_WRITE = 9
    NO_BARRIER_AFTER_READ = 10
    FEWER_AT_BARRIER = 11
    NO_SET_UP_BARRIER = 12
    NO_KERNELS_WAIT = 13
    ONE_ARRIVAL_LESS = 14
    ONE_ARRIVAL_MORE = 15
    UNALIGNED_COPY = 16
    COPY_BEYOND_END = 17
    LAST_ROW_NOT_WAITED = 18
    OTHER_INSTRUCTION = 19


class Cluster(IntEnum):
    """`ClusterFault` of cases.cu."""

    NO_FIRST_MEETING = 1
    NO_LAST_MEETING = 2
    NO_BYTES_WAIT = 3
    NO_SENT_WAIT = 4
    READ_BEYOND_END = 5


class Product(IntEnum):
    """`ProductFault` of cases.cu."""

    NO_FENCE = 1
    NO_COMMIT = 2
    NO_PRODUCTS_WAIT = 3
    A_WARP_LESS = 4
    NO_TILE_WAIT = 5


@pytest.mark.parametrize("kernel", ["ring", "cluster", "products"])
def test_without_a_fault_any_order_is_right(cases: Cases, kernel: str) -> None:
    for seed in range(10):
        getattr(cases, kernel)(0, seed)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [("ring", fault) for fault in Ring]
    + [("cluster", fault) for fault in Cluster]
    + [("products", fault) for fault in Product],
)
def test_faults_are_found(cases: Cases, kernel: str, fault: IntEnum) -> None:
    """By the first order that is tried, or by one of a few more."""

    def is_found(seed: int) -> bool:
        try:
            getattr(cases, kernel)(fault, seed)
        except (EmulatorError, AssertionError):
            return True
        return False

    assert any(is_found(seed) for seed in range(20))


def test_a_deadlock_tells_where_threads_wait(cases: Cases) -> None:
    with pytest.raises(EmulatorError) as error:
        cases.ring(Ring.ONE_ARRIVAL_MORE, 0)
    assert "no thread can go on" in str(error.value)
    assert "warp 0, lanes 00000001: mbarrier at" in str(error.value)
    assert "lacks 1 of 5 arrivals" in str(error.value)


def test_an_access_beyond_a_tensor_is_an_error(cases: Cases) -> None:
    with pytest.raises(EmulatorError, match="there is no memory at"):
        cases.cluster(Cluster.READ_BEYOND_END, 0)


def test_matrices_of_16_bits(cases: Cases) -> None:
    x, w = torch.randn(16, 16).to(BFLOAT), torch.randn(8, 16).to(BFLOAT)
    out = cases.run("fragments", 32, x, w, 512)
    expected = (x.float() @ w.float().t()).flatten()
    assert torch.allclose(out[:128], expected, atol=1e-5)
    assert torch.allclose(out[128:256], expected, atol=1e-5)
    assert torch.all(out[256:] == 1)


def test_matrices_of_8_bits(cases: Cases) -> None:
    x, w = (torch.randn(rows, 32).to(torch.float8_e4m3fn) for rows in (16, 8))
    out = cases.run("fragments_8_bits", 32, x, w, 128)
    assert torch.allclose(out.view(16, 8), x.float() @ w.float().t(), atol=1e-4)


def test_products_read_across_rows(cases: Cases) -> None:
    for seed in range(3):
        given = AcrossRows()
        out = cases.run("products_across_rows", 128, given.x, given.w, 64 * 128, seed=seed)
        assert torch.equal(out.view(64, 128), given.expected)


def test_translation_keeps_lines() -> None:
    for path in (CASES, *WIDE_LINEAR.parent.glob("*.cu*"), *SHARED_SOURCES.glob("*.cuh")):
        text = path.read_text()
        assert translated(text).count("\n") == text.count("\n")
        assert "asm volatile" not in translated(text)
    assert kernels(WIDE_LINEAR.read_text()) == {"wide_linear": "CLUSTER"}

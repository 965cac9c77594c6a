"""The decode kernel of short contexts, short_decode.cu, in the emulator against the reference in float32.

Cache rows that no request owns, and those to be written, hold NaN, and there is no memory behind any tensor.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from emulators.cuda import CudaEmulator, EmulatorError, guarded
from kernel_cases.inputs import HeadShape, decode_inputs
from overlap_spec_kernels.attention import short_decode as module
from overlap_spec_kernels.attention.short_decode import Step, Tree, cluster_size
from overlap_spec_kernels.norm.norm_heads import HeadNorms, norm_heads_reference
from support.attention_cases import BFLOAT, CLOSE, decode_reference, tree_window, tree_window_reference

LLAMA, SMALL_LLAMA, SMOL, ALONE = HeadShape(8, 2, 128), HeadShape(6, 2, 128), HeadShape(9, 3, 64), HeadShape(1, 1, 128)
QWEN, NEXT = HeadShape(8, 1, 64), HeadShape(16, 2, 256)


class Case(NamedTuple):
    """Heads, rows of each request, cached keys, page size; spare columns of the page table; programs at most."""

    heads: HeadShape
    width: int
    lengths: list[int]
    page_size: int
    spare: int = 2
    programs: int = 128
    window: int | None = None


CASES = [
    Case(LLAMA, 4, [300], 16),
    Case(LLAMA, 1, [0], 16),
    Case(LLAMA, 4, [300, 0, 0], 16, programs=16),  # with two in the dummy slot
    Case(SMALL_LLAMA, 5, [17, 15], 64, programs=32),
    Case(SMALL_LLAMA, 1, [511, 512, 513], 16, programs=24),  # a chunk for each warp of a cluster, and one more or less
    Case(SMOL, 1, [300], 64),
    Case(SMOL, 5, [260, 33, 1], 16, programs=36),
    Case(SMOL, 3, [16, 31, 32, 33], 32, programs=24),
    Case(QWEN, 2, [140, 6], 48, programs=4),
    Case(ALONE, 8, [95, 9], 16, 0, programs=4),
    Case(ALONE, 16, [1], 64),
    Case(QWEN, 3, [37], 16, programs=4),  # in two parts
    Case(NEXT, 2, [290], 16),
    Case(NEXT, 1, [17, 300], 32, programs=16),
]
WINDOWS = [
    Case(SMOL, 5, [260, 33, 1], 16, programs=36, window=31),  # of rows some of which see no key of the first chunk
    Case(NEXT, 4, [300], 16, window=100),
    Case(LLAMA, 4, [2000], 32, 700, window=512),  # in a page table that is wide
]
TREES = [
    Case(QWEN, 4, [37], 16, programs=4),  # in two parts, the second of which sees some columns of the first
    Case(LLAMA, 4, [300], 16),
    Case(SMALL_LLAMA, 5, [17, 15], 64, programs=32),
    Case(SMOL, 5, [260, 33, 1], 16, programs=36),
    Case(LLAMA, 8, [46], 16),
    Case(ALONE, 16, [0], 64),
]
FULL = [  # up to the last place of the page table
    Case(LLAMA, 3, [2045], 16, 0),
    Case(ALONE, 8, [2040, 700], 64, 0, programs=4),
    Case(HeadShape(3, 1, 64), 4, [2044, 1, 2044], 16, 0, programs=6),
]
FAULTS = {
    "keys are used before they arrive": ("wait_copies<STAGES - 1>();", ""),
    "qkv is read before the wait": ("if (READ_BEFORE_WAIT) wait_for_kernels_before();", ""),
    "sent before barriers are set up": ("    wait_cluster();", ""),
    "finished before all is there": ("wait(&common.arrived, 0);", ""),
    "q is read before it is placed": ("    __syncthreads();\n    Sums", "    Sums"),
    "sums are read before they are left": ("    __syncthreads();\n    wait_cluster", "    wait_cluster"),
    "the next chunk is in the wrong stage": ("step + STAGES)", "step + STAGES - 1)"),
    "a row sees the next one": ("row <= pair / GROUP", "row <= pair / GROUP + 1"),
    "keys behind the last are seen": ("return key < left", "return key <= left"),
}


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    module._kernel.cache_clear()
    cuda_emulator.install(monkeypatch, module)
    yield cuda_emulator
    module._kernel.cache_clear()


def check(
    emulator: CudaEmulator, case: Case, seed: int, read_before_wait: bool, norms: HeadNorms | None = None
) -> None:
    inputs = decode_inputs(case.heads, case.width, case.lengths, case.page_size, BFLOAT, case.spare)
    step = Step(*(guarded(tensor) for tensor in inputs[:6]))
    emulator.seed = seed
    emulator.written_before = [step.qkv] if read_before_wait else [step.qkv, step.positions]
    if norms is not None:
        norm_heads_reference(inputs.qkv, norms.query, norms.key, case.heads.num_kv_heads, norms.eps)
    out, k_cache, v_cache = decode_reference(inputs, window=case.window)
    actual = module.attend(module.parts_of(step), inputs.scale, read_before_wait, norms, case.window)
    torch.testing.assert_close(actual.float(), out, **CLOSE[BFLOAT])
    torch.testing.assert_close(step.k_cache, k_cache, equal_nan=True, **CLOSE[BFLOAT])
    torch.testing.assert_close(step.v_cache, v_cache, equal_nan=True, rtol=0, atol=0)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(2 * len(CASES))
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(emulator: CudaEmulator, case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters of 8, 4 and 2, by the programs that there may be."""
    monkeypatch.setattr(module, "_PROGRAMS", dict.fromkeys(module._PROGRAMS, case.programs))
    check(emulator, case, seed, read_before_wait=seed == 0)


@pytest.mark.slow_but_every(len(WINDOWS))
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_windows(emulator: CudaEmulator, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROGRAMS", dict.fromkeys(module._PROGRAMS, case.programs))
    check(emulator, case, 1, read_before_wait=True)


def check_tree(emulator: CudaEmulator, case: Case, seed: int, read_before_wait: bool) -> None:
    window = tree_window(case.heads, case.width, case.lengths, case.page_size, case.spare)
    step = Step(*(guarded(tensor) for tensor in window.inputs[:6]))
    tree = Tree(guarded(window.prefix), guarded(window.mask))
    emulator.seed = seed
    emulator.written_before = [step.qkv] if read_before_wait else [step.qkv, step.positions, *tree]
    out, k_cache, v_cache = tree_window_reference(window)
    actual = module.attend(module.parts_of(step), window.inputs.scale, read_before_wait, tree=tree)
    torch.testing.assert_close(actual.float(), out, **CLOSE[BFLOAT])
    torch.testing.assert_close(step.k_cache, k_cache, equal_nan=True, **CLOSE[BFLOAT])
    torch.testing.assert_close(step.v_cache, v_cache, equal_nan=True, rtol=0, atol=0)


@pytest.mark.slow_but_every(len(TREES))
@pytest.mark.parametrize("case", TREES, ids=str)
def test_trees(emulator: CudaEmulator, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROGRAMS", dict.fromkeys(module._PROGRAMS, case.programs))
    for seed in range(2):
        check_tree(emulator, case, seed, read_before_wait=seed == 0)


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("case", [CASES[-2], CASES[0], CASES[6], WINDOWS[1]], ids=str)
def test_heads_get_their_norms(emulator: CudaEmulator, case: Case) -> None:
    """Of every size, by weights of both types."""
    for seed, dtype in enumerate((BFLOAT, torch.float32)):
        query, key = (torch.rand(case.heads.head_dim).to(dtype) + 0.5 for _ in range(2))
        check(emulator, case, seed, read_before_wait=seed == 0, norms=HeadNorms(query, key, 0.01))


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_page_tables(emulator: CudaEmulator, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROGRAMS", dict.fromkeys(module._PROGRAMS, case.programs))
    check(emulator, case, 0, read_before_wait=True)


def test_cases_have_clusters_of_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = set()
    for case in CASES:
        monkeypatch.setattr(module, "_PROGRAMS", dict.fromkeys(module._PROGRAMS, case.programs))
        inputs = decode_inputs(case.heads, case.width, case.lengths, case.page_size, BFLOAT)
        sizes.add(cluster_size(Step(*inputs[:6])))
    assert sizes == {2, 4, 8}


@pytest.mark.full_but_every(6)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(emulator: CudaEmulator, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of a few orders of events."""
    right, wrong = FAULTS[fault]
    for path in module.SOURCE.parent.glob("short_decode*"):
        shutil.copy(path, tmp_path)
    source = tmp_path / module.SOURCE.name
    assert source.read_text().count(right) == 1
    source.write_text(source.read_text().replace(right, wrong))
    monkeypatch.setattr(module, "SOURCE", source)
    monkeypatch.setattr(module, "_PROGRAMS", dict.fromkeys(module._PROGRAMS, 4))
    with pytest.raises((AssertionError, EmulatorError)):
        for seed in range(12):
            check(emulator, Case(HeadShape(2, 1, 64), 3, [730, 41], 16), seed, read_before_wait=True)

"""Tree attention's Gluon kernel, launched by its op and interpreted, against the reference in float32.

Cache rows that no request owns, and extra keys that no row sees, hold NaN, and so does shared memory before a copy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch
from kernel_cases.inputs import HeadShape, TreeInputs, tree_inputs
from overlap_spec_kernels import tree_attention as op
from overlap_spec_kernels.attention.decode_attention import DecodeScratch
from overlap_spec_kernels.attention.tree_attention import tree_attention_reference
from support.attention_cases import BFLOAT, CLOSE, FLOAT, HALF, Case, name

if TYPE_CHECKING:
    from emulators.gluon.launch import Hopper

PREFIXES = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 333]  # around blocks of 32 and 64 keys


def check(gpu: Hopper, inputs: TreeInputs, num_programs: int) -> None:
    wide = {name: getattr(inputs, name).float() for name in ("q", "k_cache", "v_cache")}
    expected = tree_attention_reference(*inputs._replace(**wide))
    scratch = DecodeScratch.allocate(inputs.q.shape[2], torch.device("cpu"), num_programs)
    actual = op(*inputs, None, scratch)
    assert gpu.kernels == ["tree_attention_gluon_kernel"]
    assert actual.dtype == inputs.q.dtype
    torch.testing.assert_close(actual.float(), expected, **CLOSE[inputs.q.dtype])


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(
    ("case", "num_extra", "tiles"),
    [
        (Case(HeadShape(9, 3, 64), 16, 16, BFLOAT), 16, (64, 64, 4)),
        (Case(HeadShape(2, 2, 64), 4, 64, HALF), 7, (64, 64, 4)),
        (Case(HeadShape(8, 1, 64), 33, 32, HALF), 64, (64, 64, 4)),
        (Case(HeadShape(4, 1, 128), 1, 16, BFLOAT), 1, (64, 64, 3)),
        (Case(HeadShape(8, 2, 128), 33, 64, HALF), 36, (64, 64, 3)),
        (Case(HeadShape(4, 1, 128), 32, 16, BFLOAT), 32, (128, 32, 4)),
    ],
    ids=name,
)
def test_tiles(gpu: Hopper, case: Case, num_extra: int, tiles: tuple[int, int, int]) -> None:
    """(rows and heads, keys of a block, stages) as the op chooses them where programs are many."""
    check(gpu, tree_inputs(case.heads, case.width, num_extra, PREFIXES, case.page_size, case.dtype), num_programs=1)
    constants = gpu.launches[0].constants
    assert (constants["BLOCK_M"], constants["KEYS"], constants["STAGES"]) == tiles


def test_few_programs(gpu: Hopper) -> None:
    """Four stages of heads of 128 columns, where no two programs share a multiprocessor."""
    inputs = tree_inputs(HeadShape(4, 1, 128), 8, 24, [400, 63], 16, BFLOAT)
    check(gpu, inputs, num_programs=8)
    assert gpu.launches[0].constants["STAGES"] == 4


def test_rows_of_a_projection(gpu: Hopper) -> None:
    """q as a view of q, k and v side by side."""
    inputs = tree_inputs(HeadShape(3, 1, 64), 4, 5, [100, 3], 16, BFLOAT)
    check(gpu, inputs._replace(q=torch.cat((inputs.q, inputs.q), dim=1)[:, :3]), num_programs=1)


class Elsewhere:
    """Takes the place of the Triton kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> NoReturn:
        raise LookupError("the Triton kernel is launched")


@pytest.mark.parametrize(
    ("case", "num_extra", "num_programs", "window"),
    [
        (Case(HeadShape(3, 1, 64), 4, 16, BFLOAT), 5, 1, 8),
        (Case(HeadShape(3, 1, 64), 4, 16, BFLOAT), 5, 6, None),
        (Case(HeadShape(3, 1, 64), 4, 16, BFLOAT), 65, 1, None),
        (Case(HeadShape(3, 1, 64), 4, 16, FLOAT), 5, 1, None),
        (Case(HeadShape(3, 1, 96), 4, 16, BFLOAT), 5, 1, None),
        (Case(HeadShape(3, 1, 64), 4, 8, BFLOAT), 5, 1, None),
    ],
    ids=name,
)
def test_the_triton_kernel_takes_the_rest(
    gpu: Hopper, monkeypatch: pytest.MonkeyPatch, case: Case, num_extra: int, num_programs: int, window: int | None
) -> None:
    """A window, few programs, more extra keys than a word has bits, float32, rare head dimensions and page sizes."""
    module = importlib.import_module("overlap_spec_kernels.attention.tree_attention")
    monkeypatch.setattr(module, "tree_attention_kernel", Elsewhere())
    inputs = tree_inputs(case.heads, case.width, num_extra, [20], case.page_size, case.dtype)
    with pytest.raises(LookupError, match="Triton"):
        op(*inputs, window, DecodeScratch.allocate(128, torch.device("cpu"), num_programs))
    assert not gpu.launches

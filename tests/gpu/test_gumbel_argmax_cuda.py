"""Drawing on a GPU: the same columns as its twin draws there, but where rounding of a logarithm decides."""

import pytest
import torch
from overlap_spec_kernels.logits.filter_cutoff import Filters, filter_cutoff_reference
from overlap_spec_kernels.logits.gumbel_argmax import _gumbel_argmax_triton, gumbel_argmax_reference
from support.drawing_inputs import DRAWING_SHAPES, cutoff_inputs, drawing_inputs, near_ties

CUDA = torch.device("cuda")


@pytest.mark.parametrize(("batch", "rows", "columns"), [*DRAWING_SHAPES, (32, 4, 128_256), (64, 1, 49_152)])
def test_gumbel_argmax(batch: int, rows: int, columns: int) -> None:
    inputs = drawing_inputs(batch, rows, columns, CUDA)
    assert torch.equal(_gumbel_argmax_triton(*inputs), gumbel_argmax_reference(*inputs))


@pytest.mark.parametrize(("batch", "rows", "columns"), [(5, 2, 2500), (32, 4, 128_256)])
def test_gumbel_argmax_of_what_a_cutoff_keeps(batch: int, rows: int, columns: int) -> None:
    inputs = drawing_inputs(batch, rows, columns, CUDA)
    _, _, *filters = cutoff_inputs(batch, rows, columns, CUDA, 1.0)
    cutoff = filter_cutoff_reference(inputs[0], inputs[2], Filters(*filters))
    assert torch.equal(_gumbel_argmax_triton(*inputs, cutoff), gumbel_argmax_reference(*inputs, cutoff))


def test_values_that_float32_cannot_tell_apart() -> None:
    inputs = near_ties(500, 5000, CUDA)
    assert torch.equal(_gumbel_argmax_triton(*inputs), gumbel_argmax_reference(*inputs))

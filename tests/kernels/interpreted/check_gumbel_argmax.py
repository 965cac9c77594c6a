"""Drawing under the interpreter: the same columns as its twin draws."""

import pytest
import torch
from overlap_spec_kernels.logits.filter_cutoff import Filters, filter_cutoff_reference
from overlap_spec_kernels.logits.gumbel_argmax import _gumbel_argmax_triton, gumbel_argmax_reference
from support.drawing_inputs import DRAWING_SHAPES, cutoff_inputs, drawing_inputs, near_ties

CPU = torch.device("cpu")


@pytest.mark.parametrize(("batch", "rows", "columns"), [*DRAWING_SHAPES, (40, 2, 100)])
def test_gumbel_argmax(batch: int, rows: int, columns: int) -> None:
    inputs = drawing_inputs(batch, rows, columns, CPU)
    assert torch.equal(_gumbel_argmax_triton(*inputs), gumbel_argmax_reference(*inputs))


@pytest.mark.parametrize(("batch", "rows", "columns"), [(5, 2, 1500), (40, 2, 100)])
def test_gumbel_argmax_of_what_a_cutoff_keeps(batch: int, rows: int, columns: int) -> None:
    inputs = drawing_inputs(batch, rows, columns, CPU)
    _, _, *filters = cutoff_inputs(batch, rows, columns, CPU, 1.0)
    cutoff = filter_cutoff_reference(inputs[0], inputs[2], Filters(*filters))
    found = _gumbel_argmax_triton(*inputs, cutoff)
    assert torch.equal(found, gumbel_argmax_reference(*inputs, cutoff))
    assert not torch.equal(found, gumbel_argmax_reference(*inputs))


def test_values_that_float32_cannot_tell_apart() -> None:
    inputs = near_ties(100, 300, CPU)
    assert torch.equal(_gumbel_argmax_triton(*inputs), gumbel_argmax_reference(*inputs))

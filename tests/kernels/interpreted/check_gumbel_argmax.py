"""Drawing under the interpreter: the same columns as its twin draws."""

import pytest
import torch
from overlap_spec_kernels.logits.gumbel_argmax import _gumbel_argmax_triton, gumbel_argmax_reference
from support.drawing_inputs import DRAWING_SHAPES, drawing_inputs


@pytest.mark.parametrize(("batch", "rows", "columns"), DRAWING_SHAPES)
def test_gumbel_argmax(batch: int, rows: int, columns: int) -> None:
    inputs = drawing_inputs(batch, rows, columns, torch.device("cpu"))
    assert torch.equal(_gumbel_argmax_triton(*inputs), gumbel_argmax_reference(*inputs))

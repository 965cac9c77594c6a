"""Drawing under the interpreter: the same columns as its reference draws."""

import pytest
import torch
from overlap_spec_kernels.logits.filter_cutoff import Filters, filter_cutoff_reference
from overlap_spec_kernels.logits.gumbel_argmax import Draws, _gumbel_argmax_triton, gumbel_argmax_reference
from overlap_spec_kernels.logits.noisy_logits import _noisy_logits_triton, noisy_logits_reference
from support.drawing_inputs import DRAWING_SHAPES, cutoff_inputs, drawing_inputs, near_ties

CPU = torch.device("cpu")


@pytest.mark.slow_but_every(2)
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


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(("batch", "rows", "columns"), [*DRAWING_SHAPES, (40, 2, 100)])
@pytest.mark.parametrize("filtered", [False, True])
def test_noisy_logits(batch: int, rows: int, columns: int, filtered: bool) -> None:
    draws = Draws(*drawing_inputs(batch, rows, columns, CPU))
    _, _, *filters = cutoff_inputs(batch, rows, columns, CPU, 1.0)
    cutoff = filter_cutoff_reference(draws.logits, draws.temperature, Filters(*filters)) if filtered else None
    found, expected = _noisy_logits_triton(draws, cutoff), noisy_logits_reference(draws, cutoff)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[draws.temperature <= 0], draws.logits[draws.temperature <= 0].double())

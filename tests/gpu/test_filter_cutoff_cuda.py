"""What filters keep on a GPU: the same columns as its twin there, and the same for a row alone."""

import pytest
import torch
from overlap_spec_kernels.logits import filter_cutoff as module
from overlap_spec_kernels.logits.filter_cutoff import Cutoff, Filters, _filter_cutoff_triton, filter_cutoff_reference
from support.drawing_inputs import cutoff_inputs
from torch import Tensor

CUDA = torch.device("cuda")
SHAPES = [(1, 1, 1), (9, 1, 17), (9, 2, 1500), (32, 4, 128_256), (64, 1, 49_152), (9, 1, 151_936)]


def kept(logits: Tensor, cutoff: Cutoff) -> Tensor:
    return module.kept_columns(logits, cutoff) & logits.isfinite()


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize(("batch", "rows", "columns"), SHAPES)
def test_filter_cutoff(batch: int, rows: int, columns: int, spread: float) -> None:
    logits, temperature, *filters = cutoff_inputs(batch, rows, columns, CUDA, spread)
    found = _filter_cutoff_triton(logits, temperature, Filters(*filters))
    expected = filter_cutoff_reference(logits, temperature, Filters(*filters))
    assert torch.equal(kept(logits, found), kept(logits, expected))


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_a_row_alone_has_the_same_cutoff(spread: float) -> None:
    logits, temperature, *filters = cutoff_inputs(32, 4, 128_256, CUDA, spread)
    together = _filter_cutoff_triton(logits, temperature, Filters(*filters))
    for slot in range(9):
        one = slice(slot, slot + 1)
        alone = Filters(*(values[one] for values in filters))
        found = _filter_cutoff_triton(logits[one, 2:3].contiguous(), temperature[one], alone)
        assert all(torch.equal(x.flatten(), y[slot, 2:3]) for x, y in zip(found, together, strict=True))


@pytest.mark.parametrize("capacity", [16, 2048])
def test_a_bracket_of_many_columns(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CAPACITY", capacity)
    test_filter_cutoff(9, 2, 49_152, 1.0)

"""What filters keep on a GPU: as the reference, but where rounding of a sum decides; and the same for a row alone."""

import pytest
import torch
from overlap_spec_kernels.logits import filter_cutoff as module
from overlap_spec_kernels.logits.filter_cutoff import Cutoff, Filters, _filter_cutoff_triton, filter_cutoff_reference
from support.drawing_inputs import cutoff_inputs
from torch import Tensor

CUDA = torch.device("cuda")
SHAPES = [(1, 1, 1), (9, 1, 17), (9, 2, 1500), (32, 4, 128_256), (64, 1, 49_152), (9, 1, 151_936)]


def assert_alike(logits: Tensor, temperature: Tensor, filters: Filters, found: Cutoff, expected: Cutoff) -> None:
    """Where two sets differ, it is by a column or two, and the smaller one weighs what top_p asks for."""
    sets = [module.kept_columns(logits, cutoff) & logits.isfinite() for cutoff in (found, expected)]
    for slot, row in (sets[0] != sets[1]).any(2).nonzero().tolist():
        p = (logits[slot, row].double() / temperature[slot]).softmax(0)
        smaller, larger = sorted((kept[slot, row] for kept in sets), key=lambda kept: int(kept.sum()))
        assert larger.sum() - smaller.sum() <= 2
        assert abs(p[smaller].sum() - filters.top_p[slot]) < 2e-6


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize(("batch", "rows", "columns"), SHAPES)
def test_filter_cutoff(batch: int, rows: int, columns: int, spread: float) -> None:
    logits, temperature, *values = cutoff_inputs(batch, rows, columns, CUDA, spread)
    filters = Filters(*values)
    found = _filter_cutoff_triton(logits, temperature, filters)
    assert_alike(logits, temperature, filters, found, filter_cutoff_reference(logits, temperature, filters))


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

"""What filters keep, under the interpreter: the same columns as its reference, also where lists overflow."""

import pytest
import torch
from overlap_spec_kernels.logits import filter_cutoff as module
from overlap_spec_kernels.logits.filter_cutoff import Filters, _filter_cutoff_triton, filter_cutoff_reference
from support.drawing_inputs import cutoff_inputs

CPU = torch.device("cpu")


def check(batch: int, rows: int, columns: int, spread: float) -> None:
    logits, temperature, *filters = cutoff_inputs(batch, rows, columns, CPU, spread)
    found = _filter_cutoff_triton(logits, temperature, Filters(*filters))
    expected = filter_cutoff_reference(logits, temperature, Filters(*filters))
    kept = (module.kept_columns(logits, cutoff) & logits.isfinite() for cutoff in (found, expected))
    assert torch.equal(*kept)


@pytest.mark.parametrize(
    ("rows", "columns", "spread"),
    [
        (1, 17, 0.0),
        (1, 600, 1.0),
        pytest.param(2, 1, 1.0, marks=pytest.mark.slow),
        pytest.param(1, 1500, 0.0, marks=pytest.mark.slow),
        pytest.param(1, 1500, 4.0, marks=pytest.mark.slow),
    ],
)
def test_filter_cutoff(rows: int, columns: int, spread: float) -> None:
    check(9, rows, columns, spread)


@pytest.mark.slow
@pytest.mark.parametrize(("few", "capacity", "spread"), [(4, 16, 0.0), (4, 16, 1.0), (64, 512, 0.0)])
def test_a_bracket_of_many_columns(few: int, capacity: int, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is narrowed once more, does not fit its list, or takes several blocks."""
    for name, value in {"_FEW": few, "_CAPACITY": capacity, "_BLOCK": 128}.items():
        monkeypatch.setattr(module, name, value)
    check(9, 1, 500, spread)

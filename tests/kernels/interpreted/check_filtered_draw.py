"""Drawing of what filters keep, under the interpreter: the columns that its twin draws, and few rows are searched."""

import pytest
import torch
from overlap_spec_kernels.logits.filter_cutoff import Filters, filter_cutoff_reference, kept_columns, search_cutoff
from overlap_spec_kernels.logits.filtered_draw import _filtered_draw_triton, filtered_draw_reference
from overlap_spec_kernels.logits.gumbel_argmax import Draws, gumbel_argmax_reference
from support.drawing_inputs import cutoff_inputs, drawing_inputs

CPU = torch.device("cpu")


def drawing(batch: int, rows: int, columns: int, spread: float) -> tuple[Draws, Filters]:
    """All kinds of filters, and slots without any, and greedy ones, on logits with ties."""
    _, positions, _, seed, token_ids = drawing_inputs(batch, rows, columns, CPU)
    logits, temperature, *filters = cutoff_inputs(batch, rows, columns, CPU, spread)
    return Draws(logits, positions, temperature, seed, token_ids), Filters(*filters)


@pytest.mark.parametrize(
    ("rows", "columns", "spread"),
    [
        (1, 100, 1.0),
        pytest.param(2, 100, 0.0, marks=pytest.mark.slow),
        pytest.param(1, 1500, 4.0, marks=pytest.mark.slow),
    ],
)
def test_filtered_draw(rows: int, columns: int, spread: float) -> None:
    draws, filters = drawing(9, rows, columns, spread)
    assert torch.equal(_filtered_draw_triton(draws, filters), filtered_draw_reference(draws, filters))


def test_a_row_is_settled_where_its_filters_keep_what_was_drawn() -> None:
    draws, filters = drawing(18, 1, 100, 1.0)
    drawn = gumbel_argmax_reference(*draws)
    search = search_cutoff(draws.logits, draws.temperature, filters, drawn)
    kept = kept_columns(draws.logits, filter_cutoff_reference(draws.logits, draws.temperature, filters))
    expected = kept.gather(2, drawn[..., None]).flatten()
    assert torch.equal(search.settled.bool(), expected)
    assert expected.any() and not expected.all()

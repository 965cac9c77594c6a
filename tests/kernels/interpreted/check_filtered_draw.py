"""Drawing of what filters keep, under the interpreter: its reference's columns, and few rows are searched."""

import pytest
import torch
from overlap_spec_kernels.logits.filter_cutoff import (
    CutoffSearch,
    Filters,
    RowState,
    filter_cutoff_reference,
    kept_columns,
)
from overlap_spec_kernels.logits.filtered_draw import _exact_triton, _guess_triton, filtered_draw_reference
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
        pytest.param(2, 100, 0.0, marks=pytest.mark.slow),  # more rows, which draw a third time
        pytest.param(1, 1500, 4.0, marks=pytest.mark.slow),
    ],
)
def test_filtered_draw(rows: int, columns: int, spread: float) -> None:
    draws, filters = drawing(9, rows, columns, spread)
    assert torch.equal(_exact_triton(draws, filters), filtered_draw_reference(draws, filters))


@pytest.mark.slow
def test_a_guess_is_the_same_where_it_is_kept() -> None:
    draws, filters = drawing(27, 1, 100, 1.0)
    guessed = _guess_triton(draws, filters)
    kept = kept_of(draws, filters, guessed)
    assert torch.equal(guessed[kept], filtered_draw_reference(draws, filters)[kept])
    assert 0.6 < kept.float().mean() < 1


def test_a_row_is_settled_where_its_filters_keep_what_was_drawn() -> None:
    draws, filters = drawing(18, 1, 100, 1.0)
    drawn, search = gumbel_argmax_reference(*draws), CutoffSearch(draws.logits, draws.temperature, filters)
    search.begin(drawn)
    settled = (search.states == RowState.SETTLED).view_as(drawn)
    assert torch.equal(settled, kept_of(draws, filters, drawn))
    assert settled.any() and not settled.all()
    left = kept_columns(draws.logits, search.before)[~settled]
    kept = kept_columns(draws.logits, filter_cutoff_reference(draws.logits, draws.temperature, filters))[~settled]
    assert (left >= kept).all() and not left.gather(1, drawn[~settled][:, None]).any()


def kept_of(draws: Draws, filters: Filters, columns: torch.Tensor) -> torch.Tensor:
    cutoff = filter_cutoff_reference(draws.logits, draws.temperature, filters)
    return kept_columns(draws.logits, cutoff).gather(2, columns[..., None]).squeeze(2)

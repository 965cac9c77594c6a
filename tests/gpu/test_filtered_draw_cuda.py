"""Drawing of what filters keep, on a GPU: the same columns as with the cutoff of every row, and for a row alone."""

import pytest
import torch
from overlap_spec_kernels import Draws, Filters, filter_cutoff, filtered_draw, gumbel_argmax, kept_columns
from support.drawing_inputs import cutoff_inputs, drawing_inputs

CUDA = torch.device("cuda")


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize(("batch", "rows", "columns"), [(9, 1, 17), (9, 2, 1500), (64, 1, 49_152), (32, 4, 128_256)])
def test_filtered_draw(batch: int, rows: int, columns: int, spread: float) -> None:
    _, positions, _, seed, token_ids = drawing_inputs(batch, rows, columns, CUDA)
    logits, temperature, *values = cutoff_inputs(batch, rows, columns, CUDA, spread)
    filters, draws = Filters(*values), Draws(logits, positions, temperature, seed, token_ids)
    drawn, cutoff = filtered_draw(draws, filters), filter_cutoff(logits, temperature, filters)
    assert torch.equal(drawn, gumbel_argmax(*draws, cutoff))
    assert not torch.equal(drawn, gumbel_argmax(*draws))
    guessed = filtered_draw(draws, filters, exact=False)
    kept = kept_columns(logits, cutoff).gather(2, guessed[..., None]).squeeze(2)
    assert torch.equal(guessed[kept], drawn[kept]) and (spread == 0 or kept.float().mean() > 0.5)
    for slot in range(min(batch, 9)):
        one = slice(slot, slot + 1)
        of_slot = Draws(logits[one], positions[one], temperature[one], seed[one], token_ids)
        assert torch.equal(filtered_draw(of_slot, Filters(*(value[one] for value in values))), drawn[one])

"""Slot rows before a request has taken them: what pads a captured batch."""

import torch
from support.no_processors import no_processors

from overlap_spec.sampling.types import EVERY_WORK
from overlap_spec.worker.slots import SlotRows


def test_the_dummy_slot_draws_greedily_and_penalizes_nothing() -> None:
    """With filters that keep nothing, or a division by 0, its log-probs would be no numbers, which no sort can take."""
    slots = SlotRows(2, 4, 3, no_processors(10, num_pages=2, page_size=4))
    drawing = slots.sampling(torch.tensor([slots.dummy]), EVERY_WORK)
    assert drawing.temperature.tolist() == [0.0]
    assert drawing.penalties.tolist() == [[1.0, 0.0, 0.0]]

"""Slot rows: what pads a captured batch, and what new requests and pages leave in them."""

import torch
from support.launches import META, launches
from support.no_processors import no_processors
from support.plans import SlotPart, plan_of, windows
from torch import Tensor

from overlap_spec.messages import ResetSlot, SamplingParams
from overlap_spec.sampling.context import EVERY_WORK
from overlap_spec.worker.devices import pack_ints
from overlap_spec.worker.slots import SlotRows

PLAIN = ResetSlot(SamplingParams(temperature=0.0, seed=3), 4, (), 5, output_from=4)
ASKED = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    seed=-(1 << 62),
)


class PromptLengths:
    """A feature's columns: a number before the length of the request's prompt."""

    width = 2
    neutral = pack_ints((7, -1))

    def __init__(self, name: str) -> None:
        self._name = name

    def pack(self, reset: ResetSlot) -> bytes:
        return pack_ints((8, reset.prompt_len))

    def rules(self, columns: Tensor) -> dict[str, Tensor]:
        return {self._name: columns}


def slot_rows(num_placed: int = 0) -> SlotRows:
    return SlotRows(3, 4, 6, no_processors(10, num_pages=2, page_size=4), num_placed)


def load(slots: SlotRows, *work: SlotPart) -> None:
    """As a step does."""
    plan = plan_of(0, work, 1)
    count, changes = slots.pack_changes(plan)
    slots.apply(torch.frombuffer(bytearray(changes or bytes(8)), dtype=torch.int64), count)


def test_the_dummy_slot_draws_greedily() -> None:
    """With filters that keep nothing its log-probs would be no numbers, which no sort can take."""
    slots = slot_rows()
    drawing = slots.sampling(torch.tensor([slots.dummy]), EVERY_WORK)
    assert drawing.temperature.tolist() == [0.0]


def test_a_slot_draws_as_its_request_asks_and_its_neighbours_as_before() -> None:
    slots = slot_rows()
    load(slots, SlotPart(0, reset=PLAIN), SlotPart(2, reset=ResetSlot(ASKED, 9, (1, 2), 11, output_from=9)))
    drawing = slots.sampling(torch.tensor([2, 0, slots.dummy]), EVERY_WORK)
    assert drawing.temperature.tolist() == [0.7, 0.0, 0.0]
    assert drawing.top_k.tolist() == [5, 1 << 62, 0]
    assert drawing.top_p.tolist() == [0.9, 1.0, 0.0] and drawing.min_p.tolist() == [0.1, 0.0, 0.0]
    assert drawing.seed.tolist() == [-(1 << 62), 3, 0] == slots.seeds[[2, 0, 3]].tolist()
    assert drawing.stop_from.tolist() == [11, 5, 0] and drawing.output_from.tolist() == [9, 4, 0]
    assert drawing.stop_ids[:2, :3].tolist() == [[1, 2, -1], [-1, -1, -1]] and (drawing.stop_ids[0, 2:] == -1).all()
    assert slots.most_steps.tolist() == [1 << 62] * 4


def test_the_next_request_of_a_slot_finds_nothing_of_the_one_before() -> None:
    slots = slot_rows(num_placed=2)
    audits = slots.dummy + 2  # the last row
    for slot in (1, audits):
        load(slots, SlotPart(slot, new_pages=[3, 4, 5], reset=ResetSlot(ASKED, 9, (1, 2), 11, output_from=9)))
        load(slots, SlotPart(slot, new_pages=[6]))
        assert slots.page_table[slot].tolist() == [3, 4, 5, 6, 0, 0]
        load(slots, SlotPart(slot, new_pages=[7], reset=PLAIN), SlotPart(0))
        load(slots, SlotPart(0), SlotPart(slot, new_pages=[8]))
        assert slots.page_table[slot].tolist() == [7, 8, 0, 0, 0, 0]
        drawing = slots.sampling(torch.tensor([slot]), EVERY_WORK)
        assert drawing.temperature.tolist() == [0.0] and (drawing.stop_ids == -1).all()
    assert not slots.page_table[[0, 2, slots.dummy, slots.dummy + 1]].any()


def test_a_request_that_ends_before_it_has_pages_leaves_its_slot_to_the_next() -> None:
    slots = slot_rows()
    load(slots, SlotPart(1, new_pages=[3, 4], reset=PLAIN))
    load(slots, SlotPart(1, reset=PLAIN))  # and is aborted
    assert not slots.page_table[1].any()
    load(slots, SlotPart(1, new_pages=[5], reset=PLAIN))
    assert slots.page_table[1].tolist() == [5, 0, 0, 0, 0, 0]


def test_columns_of_features_are_neutral_until_a_request_takes_the_slot() -> None:
    """Side by side in one tensor, which stays where it is: captured steps read it. Rules of others stay as they are."""
    slots = slot_rows(num_placed=1)
    neutral = slots.processors.rules
    slots.draw_through((), (), (PromptLengths("has"), PromptLengths("words")))
    first, second = slots.processors.rules["has"], slots.processors.rules["words"]
    assert first.tolist() == second.tolist() == [[7, -1]] * 5
    assert slots.processors.rules["bias"] is neutral["bias"] and set(slots.processors.rules) == set(neutral)
    load(slots, SlotPart(4, reset=PLAIN), SlotPart(1, reset=ResetSlot(ASKED, 9, (1, 2), 11, output_from=9)))
    assert first.tolist() == second.tolist() == [[7, -1], [8, 9], [7, -1], [7, -1], [8, 4]]
    assert slots.sampling(torch.tensor([1]), EVERY_WORK).stop_ids[0, :3].tolist() == [1, 2, -1]


def test_new_requests_and_pages_are_one_launch() -> None:
    slots = SlotRows(3, 4, 6, no_processors(10, place=META))
    slots.draw_through((), (), (PromptLengths("has"),))
    plan = plan_of(0, [SlotPart(0, new_pages=[1, 2], reset=PLAIN), SlotPart(1, new_pages=[3], reset=PLAIN)], 1)
    count, changes = slots.pack_changes(plan)
    assert launches(lambda: slots.apply(torch.empty(len(changes) // 8, dtype=torch.int64, device=META), count)) == {
        "write_slots._write_slots_triton": 1
    }
    assert slots.pack_changes(windows(0, (0, 1), 1)) == (0, b"")

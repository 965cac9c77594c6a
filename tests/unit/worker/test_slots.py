"""Slot rows: what pads a captured batch, and what new requests and pages leave in them."""

import math

import torch
from support.launches import META, launches
from support.no_processors import no_processors
from support.plans import SlotPart, plan_of, windows

from overlap_spec.client.link import pack_ids
from overlap_spec.messages import ResetSlot, SamplingParams, Thinking
from overlap_spec.sampling.slot_lists import NO_BUDGET, packed_budget
from overlap_spec.sampling.types import EVERY_WORK
from overlap_spec.worker.packed_lists import PackedLists
from overlap_spec.worker.slots import SlotRows

PLAIN = ResetSlot(SamplingParams(temperature=0.0, seed=3), 4, (), 5, output_from=4)
ASKED = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=-0.3,
    logit_bias={3: 1.5},
    bad_word_ids=((1, 2), (4,)),
    seed=-(1 << 62),
    thinking=Thinking(6, True, (7,), (8, 9)),
)


def slot_rows(num_placed: int = 0) -> SlotRows:
    return SlotRows(3, 4, 6, no_processors(10, num_pages=2, page_size=4), num_placed)


def load(slots: SlotRows, *work: SlotPart) -> None:
    """As a step does."""
    plan = plan_of(0, work, 1)
    count, changes = slots.pack_changes(plan)
    slots.apply(torch.frombuffer(bytearray(changes or bytes(8)), dtype=torch.int64), count)
    if lists := slots.pack_lists(plan.resets):
        slots.apply_lists(*(torch.tensor(run, dtype=torch.int64) for run in lists))


def test_the_dummy_slot_draws_greedily_and_penalizes_nothing() -> None:
    """With filters that keep nothing, or a division by 0, its log-probs would be no numbers, which no sort can take."""
    slots = slot_rows()
    drawing = slots.sampling(torch.tensor([slots.dummy]), EVERY_WORK)
    assert drawing.temperature.tolist() == [0.0]
    assert drawing.penalties.tolist() == [[1.0, 0.0, 0.0]]


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
    assert drawing.penalties.tolist() == [[1.1, 0.2, -0.3], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    lists = slots.processors.lists
    assert lists.has[:3].tolist() == [[0, 0], [0, 0], [1, 2]]
    assert lists.bias[2, 3] == 1.5
    assert lists.budgets[:3].tolist() == [list(NO_BUDGET)] * 2 + [packed_budget(6, True, (7,), (8, 9))]
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
        assert slots.processors.lists.has[slot].tolist() == [0, 0]
        assert slots.processors.lists.budgets[slot].tolist() == list(NO_BUDGET)
    assert not slots.page_table[[0, 2, slots.dummy, slots.dummy + 1]].any()


def test_a_request_that_ends_before_it_has_pages_leaves_its_slot_to_the_next() -> None:
    slots = slot_rows()
    load(slots, SlotPart(1, new_pages=[3, 4], reset=PLAIN))
    load(slots, SlotPart(1, reset=PLAIN))  # and is aborted
    assert not slots.page_table[1].any()
    load(slots, SlotPart(1, new_pages=[5], reset=PLAIN))
    assert slots.page_table[1].tolist() == [5, 0, 0, 0, 0, 0]


def test_new_requests_and_pages_are_one_launch() -> None:
    slots = SlotRows(3, 4, 6, no_processors(10, place=META))
    plan = plan_of(0, [SlotPart(0, new_pages=[1, 2], reset=PLAIN), SlotPart(1, new_pages=[3], reset=PLAIN)], 1)
    count, changes = slots.pack_changes(plan)
    assert launches(lambda: slots.apply(torch.empty(len(changes) // 8, dtype=torch.int64, device=META), count)) == {
        "write_slots._write_slots_triton": 1
    }
    assert slots.pack_lists(plan.resets) == () and slots.pack_changes(windows(0, (0, 1), 1)) == (0, b"")


def test_requests_that_allow_the_same_tokens_share_what_is_packed_and_each_has_its_own_biases() -> None:
    slots, allowed = slot_rows(), (1, 4, 7)
    asked = [
        SamplingParams(seed=0, allowed_token_ids=allowed, logit_bias={4: 2.0, 5: 9.0}),
        SamplingParams(seed=0, allowed_ids=pack_ids(allowed), logit_bias={7: -1.5}),
        SamplingParams(seed=0, allowed_ids=pack_ids((2,))),
    ]
    work = [SlotPart(slot, reset=ResetSlot(each, 4, (), 5)) for slot, each in enumerate(asked)]
    assert len(slots.pack_lists(plan_of(0, work, 1).resets)[1]) == 2 * len(allowed) + 2, (
        "the second request's tokens are packed again"
    )
    load(slots, *work)
    bias = slots.processors.lists.bias
    found = [{i: row[i].item() for i in range(10) if row[i] > -math.inf} for row in bias[:3]]
    assert found == [{1: 0.0, 4: 2.0, 7: 0.0}, {1: 0.0, 4: 0.0, 7: -1.5}, {2: 0.0}]
    load(slots, SlotPart(1, reset=ResetSlot(SamplingParams(seed=0, logit_bias={3: 1.0}), 4, (), 5)))
    assert bias[1].tolist() == [0.0, 0.0, 0.0, 1.0, *[0.0] * 6] and bias[0][4] == 2.0


def test_many_rows_are_copied_in_parts() -> None:
    slots = SlotRows(40, 4, 6, no_processors(10, num_pages=2, page_size=4))
    asked = SamplingParams(seed=0, allowed_ids=pack_ids((3, 9)))
    load(slots, *(SlotPart(slot, reset=ResetSlot(asked, 4, (), 5)) for slot in range(40)))
    assert (slots.processors.lists.bias[:40].isfinite() == torch.tensor([i in (3, 9) for i in range(10)])).all()


def test_words_end_where_their_places_end() -> None:
    """What is compared last is the token that a word would end with."""
    lists = PackedLists()
    lists.add(2, SamplingParams(bad_word_ids=((5, 6), (7,))))
    assert lists.words == [2, 6, 5, 2, 7, 6, 2, 15, 7]


def test_only_slots_that_allow_the_same_share_a_row() -> None:
    lists = PackedLists()
    for slot, bias in enumerate(({1: 1.0}, {2: 1.0})):
        lists.add(slot, SamplingParams(logit_bias=bias))
    assert lists.copies == [] and lists.fills[::2] == [0, 1]
    for slot in (2, 3):
        lists.add(slot, SamplingParams(allowed_ids=pack_ids((4, 5))))
    assert lists.copies == [3, 2]

"""Plans on the link: they come back as they were, in few bytes, and a bad one names its place."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from support.plans import SlotPart, parts_of, plan_of, windows

from overlap_spec.client.link import pack_ids
from overlap_spec.messages import (
    EXTENSIONS,
    ChunkWork,
    Phase,
    Replayed,
    ResetSlot,
    SamplingParams,
    StepPlan,
    ToWorker,
    carrying,
    with_own_lists,
    with_shared_lists,
)

DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(carrying(ToWorker, EXTENSIONS))
MOST_BYTES = {1: (21, 26), 32: (54, 59), 256: (406, 428)}  # of a decode step; where one slot of 64 gets a page
SMALL = st.integers(0, 300)
LISTS = st.sampled_from([b"", pack_ids((1, 2)), pack_ids((3,))])
RESETS = st.builds(
    lambda length, allowed: ResetSlot(SamplingParams(seed=1, allowed_ids=allowed), length, (2,), length), SMALL, LISTS
)
NEWS = {"new_pages": st.lists(SMALL, max_size=3), "reset": st.none() | RESETS}
WINDOWS = st.fixed_dictionaries(NEWS)
CHUNKS = st.fixed_dictionaries(
    {
        **NEWS,
        "start": SMALL,
        "tokens": st.binary(min_size=4, max_size=8),
        "next_token": st.integers(-1, 9),
        "rows_out": st.tuples(SMALL, SMALL),
    }
)
PARTS = st.dictionaries(SMALL, WINDOWS | CHUNKS, min_size=1, max_size=8).map(
    lambda fields: sorted((SlotPart(slot, **each) for slot, each in fields.items()), key=lambda part: bool(part.tokens))
)


def sent(plan: StepPlan) -> StepPlan:
    found: StepPlan = DECODER.decode(msgspec.msgpack.encode(with_shared_lists(plan)))
    return with_own_lists(found)


@settings(max_examples=60, deadline=None)
@given(PARTS, st.booleans(), st.sampled_from([(), (Replayed([1], [2], [3], 4),)]))
def test_a_plan_is_the_same_at_the_other_end(
    parts: list[SlotPart], drafts: bool, extensions: tuple[Replayed, ...]
) -> None:
    plan = plan_of(7, parts, 4, drafts=drafts, extensions=extensions, first_width=3)
    found = sent(plan)
    assert found == plan and parts_of(found) == parts
    assert found.rows == [part.slot for part in parts]


@settings(max_examples=100, deadline=None)
@given(PARTS, st.booleans())
def test_the_parts_of_a_plan_are_plans_of_windows_and_of_prompts(parts: list[SlotPart], drafts: bool) -> None:
    parts = [replace(part, reset=part.reset if part.tokens else None) for part in parts]
    plan = plan_of(7, parts, 4, drafts=drafts, first_width=3)
    found = plan.parts()
    assert [part for each in found for part in parts_of(each)] == parts
    phases = [Phase.DECODE, Phase.PREFILL] if plan.slots and plan.chunks else [plan.phase]
    assert [each.phase for each in found] == phases and {each.step_id for each in found} == {7}
    if len(found) == 1:
        assert found[0] is plan
    else:
        assert [(each.width, each.drafts) for each in found] == [(4, drafts), (3, True)]


@pytest.mark.parametrize("batch_size", MOST_BYTES)
def test_a_decode_plan_has_few_bytes(batch_size: int) -> None:
    """A struct for each slot took 50, 703 and 5,535."""
    slots = list(range(batch_size))
    plans = StepPlan(100, 4, slots), StepPlan(100, 4, slots, {slot: [3000 + slot] for slot in slots[::64]})
    found = [len(msgspec.msgpack.encode(plan)) for plan in plans]
    assert all(size <= most for size, most in zip(found, MOST_BYTES[batch_size], strict=True)), found


def test_what_a_decode_plan_has_not_is_one_byte() -> None:
    columns = msgspec.to_builtins(windows(1, [5], 2))
    assert columns == ["StepPlan", 1, 2, [5], {}, [], {}, True, (), 0, []]


def test_a_bad_plan_names_its_place() -> None:
    chunk = [3, 0, b"1234", "next", [0, 0]]
    payload = ["StepPlan", 1, 2, [], {}, [chunk]]
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `str` - at `\$\[5\]\[0\]\[3\]`"):
        DECODER.decode(msgspec.msgpack.encode(payload))


def test_a_chunk_says_what_it_does_not_say_in_defaults() -> None:
    payload = ["StepPlan", 1, 2, [], {}, [[3, 0, b"1234"]]]
    assert DECODER.decode(msgspec.msgpack.encode(payload)) == StepPlan(1, 2, chunks=[ChunkWork(3, 0, b"1234", -1)])

"""What requests list, and their penalties and budgets, in the rows of their slots."""

import math

import torch
from overlap_spec_kernels import neutral_rules
from support.launches import META
from support.no_processors import no_processors
from support.plans import SlotPart, plan_of

from overlap_spec.client.link import pack_ids
from overlap_spec.features.penalties.worker import ListSteps, PackedLists, SlotLists
from overlap_spec.features.thinking.worker import NO_BUDGET, BudgetHook, packed_budget
from overlap_spec.messages import ResetSlot, SamplingParams, StepPlan, Thinking
from overlap_spec.worker.devices import CpuDevice
from overlap_spec.worker.hooks import Hooks
from overlap_spec.worker.slots import SlotRows

VOCAB = 10
PLAIN = SamplingParams(temperature=0.0, seed=3)
ASKED = SamplingParams(
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=-0.3,
    logit_bias={3: 1.5},
    bad_word_ids=((1, 2), (4,)),
    seed=1,
    thinking=Thinking(6, True, (7,), (8, 9)),
)


class Kept:
    """Some slots, as a worker keeps them."""

    def __init__(self, num_slots: int = 3) -> None:
        self._slots = SlotRows(num_slots, 4, 6, no_processors(VOCAB, num_pages=2, page_size=4))
        self._hooks = Hooks()
        self.lists = SlotLists.allocate(num_slots + 1, VOCAB, torch.device("cpu"))
        self._hooks.add("thinking", BudgetHook())
        self._hooks.add("penalties", ListSteps(self.lists, CpuDevice()))
        self._slots.draw_through((), (), self._hooks.columns)
        self.rules = self._slots.processors.rules

    def take(self, **asked: SamplingParams) -> None:
        """Requests take slots, which are named s0, s1, .."""
        parts = [SlotPart(int(slot[1:]), reset=ResetSlot(each, 4, (), 5)) for slot, each in asked.items()]
        plan = plan_of(0, parts, 1)
        for changed in self._hooks.changed:
            changed(plan)
        count, changes = self._slots.pack_changes(plan)
        self._slots.apply(torch.frombuffer(bytearray(changes), dtype=torch.int64), count)


def test_slots_that_ask_for_nothing_read_what_changes_nothing() -> None:
    """Those of an engine without these features, too; the dummy slot never asks. A division by 0 would be no number."""
    rules, neutral = Kept().rules, neutral_rules(4, VOCAB, "cpu")
    assert set(rules) == set(neutral)
    for name in ("penalties", "has", "bias", "budgets"):
        assert torch.equal(rules[name], neutral[name]), name
    assert (rules["words"] == -1).all() and (neutral["words"] == -1).all()


def test_a_slot_has_what_its_request_asks_for_and_the_next_one_finds_nothing_of_it() -> None:
    kept = Kept()
    kept.take(s0=PLAIN, s2=ASKED)
    assert kept.rules["penalties"][:3].tolist() == [[1.0, 0.0, 0.0]] * 2 + [[1.1, 0.2, -0.3]]
    assert kept.rules["has"][:3].tolist() == [[0, 0], [0, 0], [1, 2]]
    assert kept.rules["bias"][2, 3] == 1.5 and kept.rules["words"][2, 1, -1] == 4
    assert kept.rules["budgets"][:3].tolist() == [list(NO_BUDGET)] * 2 + [packed_budget(6, True, (7,), (8, 9))]
    kept.take(s2=PLAIN)
    assert kept.rules["penalties"][2].tolist() == [1.0, 0.0, 0.0] and kept.rules["has"][2].tolist() == [0, 0]
    assert kept.rules["budgets"][2].tolist() == list(NO_BUDGET)


def test_a_step_that_lists_nothing_copies_nothing() -> None:
    class NoDevice(CpuDevice):
        def upload(self, values: object) -> torch.Tensor:
            raise AssertionError

    hook = ListSteps(SlotLists.allocate(2, VOCAB, META), NoDevice())
    hook.changed(StepPlan(1, 1, resets={0: ResetSlot(PLAIN, 4, (), 5)}))


def test_requests_that_allow_the_same_tokens_share_what_is_packed_and_each_has_its_own_biases() -> None:
    kept, allowed = Kept(), (1, 4, 7)
    asked = [
        SamplingParams(seed=0, allowed_token_ids=allowed, logit_bias={4: 2.0, 5: 9.0}),
        SamplingParams(seed=0, allowed_ids=pack_ids(allowed), logit_bias={7: -1.5}),
        SamplingParams(seed=0, allowed_ids=pack_ids((2,))),
    ]
    packed = PackedLists()
    for slot, each in enumerate(asked):
        packed.add(slot, each)
    assert len(packed.runs[1]) == 2 * len(allowed) + 2, "the second request's tokens are packed again"
    kept.take(s0=asked[0], s1=asked[1], s2=asked[2])
    bias = kept.lists.bias
    found = [{i: row[i].item() for i in range(VOCAB) if row[i] > -math.inf} for row in bias[:3]]
    assert found == [{1: 0.0, 4: 2.0, 7: 0.0}, {1: 0.0, 4: 0.0, 7: -1.5}, {2: 0.0}]
    kept.take(s1=SamplingParams(seed=0, logit_bias={3: 1.0}))
    assert bias[1].tolist() == [0.0, 0.0, 0.0, 1.0, *[0.0] * 6] and bias[0][4] == 2.0


def test_many_rows_are_copied_in_parts() -> None:
    kept = Kept(40)
    kept.take(**{f"s{slot}": SamplingParams(seed=0, allowed_ids=pack_ids((3, 9))) for slot in range(40)})
    assert (kept.lists.bias[:40].isfinite() == torch.tensor([i in (3, 9) for i in range(VOCAB)])).all()


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

"""Requests of a group at the scheduler: what they share is kept once, and the worker is sent it once."""

from array import array

import msgspec
import pytest
from msgspec.structs import replace
from support.fake_device import Bench, make_admit, make_ready
from support.plans import SlotPart, plan_of

from overlap_spec.client.link import pack_ids
from overlap_spec.messages import (
    Admit,
    ResetSlot,
    Resumed,
    SamplingParams,
    StepPlan,
    with_own_lists,
    with_shared_lists,
)
from overlap_spec.scheduler.prefix_cache import Node, NoPrefixCache, PagePool
from overlap_spec.scheduler.queues import Admitted
from overlap_spec.scheduler.requests import Request

HEAVY = SamplingParams(
    max_new_tokens=4,
    seed=1,
    logit_bias=dict.fromkeys(range(300), 0.5),
    allowed_ids=pack_ids(range(5000)),
    bad_word_ids=((1, 2),) * 100,
)


def root() -> Node:
    return NoPrefixCache(PagePool(4), 4, 0).root


def copied(admit: Admit) -> Admit:
    """As it comes over the link."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(admit), type=Admit)


def admitted(admitted: Admitted, uid: int, sampling: SamplingParams = HEAVY, num_tokens: int = 5000) -> Request:
    admit = Admit(uid, pack_ids(range(num_tokens)), replace(sampling, seed=uid), (), 0.0)
    return admitted.request(copied(admit), root())


def test_what_requests_share_is_one_object_and_each_has_its_own_seed() -> None:
    maker = Admitted()
    one, two = admitted(maker, 1), admitted(maker, 2)
    assert (one.admit.sampling.seed, two.admit.sampling.seed) == (1, 2)
    assert one.admit.prompt is two.admit.prompt and one.tokens is two.tokens
    for name in ("logit_bias", "allowed_ids", "bad_word_ids"):
        assert getattr(one.admit.sampling, name) is getattr(two.admit.sampling, name), name
        assert getattr(one.admit.sampling, name) == getattr(HEAVY, name), name


def test_a_request_that_starts_has_tokens_of_its_own() -> None:
    maker = Admitted()
    one, two = admitted(maker, 1), admitted(maker, 2)
    one.own_tokens()
    one.tokens.append(7)
    assert len(one.tokens) == 5001 and len(two.tokens) == 5000
    one.own_tokens()
    assert one.tokens[-1] == 7, "tokens that are its own already are kept"


def test_a_request_that_goes_on_never_writes_into_shared_tokens() -> None:
    maker = Admitted()
    one = admitted(maker, 1)
    resumed = replace(one.admit, uid=2, resumed=Resumed(array("i", (8, 9)).tobytes(), 0, 0))
    two = maker.request(copied(resumed), root())
    assert two.tokens[-2:].tolist() == [8, 9] and len(one.tokens) == 5000


def test_tokens_are_forgotten_with_the_last_request_that_has_them() -> None:
    maker = Admitted()
    one = admitted(maker, 1)
    assert len(maker._tokens) == 1
    one.own_tokens()
    del one
    assert not maker._tokens
    assert admitted(maker, 2).tokens.tolist() == list(range(5000))


def reset(slot: int, sampling: SamplingParams) -> SlotPart:
    return SlotPart(slot, reset=ResetSlot(sampling, 4, (), 5))


def test_a_plan_carries_each_list_once_and_is_the_same_at_the_other_end() -> None:
    other = replace(HEAVY, allowed_ids=pack_ids((3,)), seed=2)
    asked = HEAVY, other, replace(HEAVY, seed=3), SamplingParams(seed=4)
    plan = plan_of(1, [SlotPart(9), *(reset(slot, each) for slot, each in enumerate(asked))], 2)
    sent = with_shared_lists(plan)
    assert sent.allowed_lists == [HEAVY.allowed_ids, other.allowed_ids]
    packed = msgspec.msgpack.encode(sent)
    assert packed.count(HEAVY.allowed_ids) == 1
    got = with_own_lists(msgspec.msgpack.decode(packed, type=StepPlan))
    assert got == plan
    lists = [each.sampling.allowed_ids for each in got.resets.values()]
    assert lists[0] is lists[2], "each request has a copy"


def test_a_plan_without_lists_is_sent_as_it_is() -> None:
    for plan in (
        plan_of(1, [reset(0, SamplingParams(seed=1))], 2),
        StepPlan(2, 2, [0]),
    ):
        assert with_shared_lists(plan) is plan and with_own_lists(plan) is plan


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_share_a_prompt_run_side_by_side_with_outputs_of_their_own(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    monkeypatch.setattr("overlap_spec.scheduler.queues.LARGE", 8)
    bench = Bench(make_ready(), depth, seed=4)
    for uid in range(1, 9):
        bench.admit(make_admit(uid, [1, 2, 3, 4, 5, 6, 7], 5 + uid, (3,)))
    waiting = list(bench.scheduler.queues.waiting)
    assert len({id(request.tokens) for request in waiting}) < len(waiting), "nothing is shared"
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()

"""Whose a request is in the log of n-grams: numbers of salts, bands of names, and what the worker is told."""

import random

import torch
from msgspec.structs import replace
from overlap_spec_kernels import ALL_BANDS, BANDS as KERNELS_BANDS, allocate_log, with_slots
from support.fake_device import Bench, make_admit, make_ready
from support.ngram_inputs import in_bands

from overlap_spec.features.ngram import DividedLog, scheduler as owners_module
from overlap_spec.features.ngram.scheduler import BANDS, IDLE_S, Owners, packed
from overlap_spec.features.ngram.worker import OwnedSlots
from overlap_spec.messages import Owner, ResetSlot, SamplingParams, StepPlan
from overlap_spec.worker.devices import CpuDevice


class Clock:
    """Seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def bands_in(owner: Owner | None) -> set[int]:
    """The bands that an owner may write in."""
    return set(range(BANDS)) if owner is None else {owner.bands >> 4 * i & 15 for i in range(BANDS)}


def test_bands_are_packed_as_the_log_has_them() -> None:
    assert BANDS == KERNELS_BANDS and packed(list(range(BANDS))) == ALL_BANDS
    for bands in ([3], [1, 4, 9], list(range(8, 16))):
        assert packed(bands) == in_bands(*bands)
    rng = random.Random(0)
    for _ in range(50):
        bands = rng.sample(range(BANDS), rng.randint(1, BANDS))
        owner = Owner(1, packed(bands))
        assert bands_in(owner) == set(bands), "all of them are used"
        assert all(owner.bands >> 4 * band & 15 == band for band in bands), "what was there is found there"


def test_salts_of_one_share_have_numbers_and_all_bands() -> None:
    owners = Owners(Clock())
    assert owners.of("", "") is None
    first, second = owners.of("", "a"), owners.of("", "b")
    assert first == Owner(1, ALL_BANDS) and second == Owner(2, ALL_BANDS)
    assert owners.of("", "a") == first and owners.of("", "") is None


def test_a_salt_that_is_forgotten_gets_another_number(monkeypatch) -> None:
    """Never one that was given before. The name that has most salts forgets."""
    monkeypatch.setattr(owners_module, "MOST_SALTS", 10)
    owners, given = Owners(Clock()), {}
    few = [owners.of("few", f"few\0{i}") for i in range(3)]
    for i in range(100):
        given[f"many\0{i}"] = owners.of("many", f"many\0{i}").number
    assert len({*given.values(), *(owner.number for owner in few)}) == 103
    assert [owners.of("few", f"few\0{i}").number for i in range(3)] == [owner.number for owner in few]
    assert owners.of("many", "many\x0099").number == given["many\x0099"]
    assert owners.of("many", "many\x000").number == 104
    assert sum(map(len, owners._numbers.values())) == owners._num_salts == 10


def test_names_have_equally_many_bands_of_their_own() -> None:
    owners = Owners(Clock())
    names = [f"name {i}" for i in range(5)]
    for count in range(1, 6):
        for name in names[:count]:
            owners.of(name, f"{name}\0")
        found = [bands_in(owners.of(name, f"{name}\0own")) for name in names[:count]]
        assert sorted(band for bands in found for band in bands) == list(range(BANDS)), "each is of one name"
        assert {len(bands) for bands in found} <= {BANDS // count, BANDS // count + 1}


def test_a_name_keeps_the_bands_that_it_may() -> None:
    owners = Owners(Clock())
    before = bands_in(owners.of("a", "a\0"))
    for name in "bcdefgh":
        owners.of(name, f"{name}\0")
        after = bands_in(owners.of("a", "a\0"))
        assert after <= before
        before = after
    assert len(before) == 2


def test_requests_without_a_name_are_one_of_those_that_share() -> None:
    owners = Owners(Clock())
    assert owners.of("", "") is None
    named = owners.of("a", "a\0")
    nameless = owners.of("", "")
    assert nameless.number == 0 and len(bands_in(nameless)) == 8
    assert bands_in(nameless) == bands_in(owners.of("", "made up")) and not bands_in(nameless) & bands_in(named)


def test_more_names_than_bands_share_them() -> None:
    owners = Owners(Clock())
    found = {}
    for i in range(40):
        found[i] = owners.of(f"name {i}", f"name {i}\0")
    bands = [bands_in(owners.of(f"name {i}", f"name {i}\0")) for i in range(40)]
    assert all(len(each) == 1 for each in bands)
    users = [sum(band in each for each in bands) for band in range(BANDS)]
    assert min(users) >= 1 and max(users) <= 4


def test_idle_names_have_no_bands() -> None:
    clock = Clock()
    owners = Owners(clock)
    for name in "abcd":
        owners.of(name, f"{name}\0")
    clock.now = IDLE_S / 2
    owners.of("b", "b\0")
    clock.now = IDLE_S + 1
    assert len(bands_in(owners.of("a", "a\0"))) == 8
    clock.now = 3 * IDLE_S
    assert bands_in(owners.of("b", "b\0")) == set(range(BANDS))


def plan_of(**owners: Owner | None) -> StepPlan:
    """Requests take slots: `s3` is slot 3."""
    resets = {int(slot[1:]): ResetSlot(SamplingParams(), 1, (), 2, owner=owner) for slot, owner in owners.items()}
    return StepPlan(1, 1, resets=resets)


def test_the_log_knows_whose_request_is_in_a_slot_until_the_next_one_takes_it() -> None:
    log = with_slots(allocate_log(1 << 14, torch.device("cpu")), 4)
    slots = OwnedSlots(log, CpuDevice())
    half = packed(list(range(8)))

    def told() -> tuple[list[int], list[int], int]:
        return log.owner.tolist(), log.bands.tolist(), int(log.stride)

    slots.changed(plan_of(s0=None, s1=Owner(5, ALL_BANDS)))
    assert told() == ([0, 5, 0, 0], [ALL_BANDS] * 4, 1)
    slots.changed(plan_of(s2=Owner(1 << 40, half)))
    assert told() == ([0, 5, 1 << 40, 0], [ALL_BANDS, ALL_BANDS, half, ALL_BANDS], BANDS)
    slots.changed(plan_of(s1=None, s0=Owner(6, ALL_BANDS)))
    assert told()[0] == [6, 0, 1 << 40, 0] and int(log.stride) == BANDS, "slot 2 has its request still"
    slots.changed(plan_of(s2=Owner(7, ALL_BANDS)))
    assert told() == ([6, 0, 7, 0], [ALL_BANDS] * 4, 1)
    slots.changed(plan_of(s2=None))
    slots.changed(plan_of(s2=Owner(7, half)))
    assert told() == ([6, 0, 7, 0], [ALL_BANDS, ALL_BANDS, half, ALL_BANDS], BANDS), "the owner before the last one"
    slots.changed(plan_of(s2=None))
    assert told() == ([6, 0, 0, 0], [ALL_BANDS] * 4, 1)


def test_the_log_has_no_slots_of_audits() -> None:
    """An audited request has its salt there, too."""
    log = with_slots(allocate_log(1 << 14, torch.device("cpu")), 4)
    slots = OwnedSlots(log, CpuDevice())
    slots.changed(plan_of(s4=Owner(5, packed([1]))))
    slots.changed(plan_of(s1=Owner(6, ALL_BANDS), s5=Owner(5, packed([1]))))
    assert log.owner.tolist() == [0, 6, 0, 0] and int(log.stride) == 1


def test_without_salts_nothing_is_launched() -> None:
    log = with_slots(allocate_log(1 << 14, torch.device("cpu")), 4)
    device = CpuDevice()
    device.upload = None  # type: ignore[assignment]  # would fail
    slots = OwnedSlots(log, device)
    for _ in range(3):
        slots.changed(plan_of(s0=None, s3=None))
    assert log.owner._version == 0


def test_a_method_that_keeps_apart_what_salts_said_is_told_whose_a_request_is() -> None:
    """By the reset of its slot, and again after a preemption."""
    ready = make_ready(is_self_drafting=True, key_lookahead=0, extensions=(DividedLog(),))
    bench = Bench(ready)
    for uid, salt in enumerate(("a", "", "b", "a"), start=1):
        bench.admit(replace(make_admit(uid, [uid] * 4), salt=salt))
    bench.finish_all()
    owners = {reset.uid: reset.owner for plan in bench.all_plans for reset in plan.resets.values()}
    assert owners[2] is None and not bench.refused
    assert owners[1] == owners[4] and len({owners[1].number, owners[3].number, 0}) == 3
    assert owners[1].bands == owners[3].bands == packed(list(range(BANDS))), "without names all write everywhere"

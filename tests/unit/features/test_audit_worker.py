"""A decode step of audits on a model that can be computed by hand: what is drawn, and by how much."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
import torch
from support.fakes import TableModel
from support.no_processors import no_processors
from support.plans import SlotPart, plan_of
from support.tiny.models import tiny_config

from overlap_spec.config import AcceptSettings, EngineConfig, Machine, ModelFiles, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.features.audit.worker import COLUMNS, AuditHook, AuditStep, attach, laid_out, needs
from overlap_spec.messages import AuditRoom, Margins, Replayed, ResetSlot, SamplingParams
from overlap_spec.models.kv_cache import KVShape
from overlap_spec.models.recurrent_state import NO_STATE, StateShape
from overlap_spec.speculative.methods import method_named
from overlap_spec.worker.build import Parts
from overlap_spec.worker.hooks import Needs
from overlap_spec.worker.runner import EagerRunner
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.startup.geometry import Geometry, LoadedModels
from overlap_spec.worker.step import StepShape

VOCAB = 23
TABLE = [(7 * token + 3) % VOCAB for token in range(VOCAB)]
WARM = SamplingParams(temperature=30.0, seed=5)  # the table's token is ahead by 50 / 30: noise often decides


def judged(position: int, served: list[int]) -> tuple[list[int], list[float]]:
    """What a step draws at a position, and the margins of `served`: one slot for each, all of one request."""
    slots = SlotRows(len(served), 1, 16, no_processors(VOCAB, num_pages=256, page_size=4))
    reset = ResetSlot(WARM, position, (), 0)
    pages = [list(range(9 * slot, 9 * slot + 9)) for slot in range(len(served))]
    own = range(len(served))
    plan = plan_of(0, [SlotPart(slot, new_pages=pages[slot], reset=reset) for slot in own], 1)
    count, changes = slots.pack_changes(plan)
    slots.apply(torch.frombuffer(bytearray(changes), dtype=torch.int64), count)
    step = AuditStep(slots, TableModel(TABLE), 4)
    replayed = Replayed([position] * len(served), [slot % 3 for slot in own], served)
    packed = torch.tensor([*laid_out(own, replayed, len(served), slots.dummy)])
    (part,) = EagerRunner(ANY, ANY, step).forward(StepShape(len(served), 1, 16, placed=True), packed)
    published = part.decide(slots.sampling_work(own))
    return published.rows[:, COLUMNS.tokens].flatten().tolist(), published.outputs[0].flatten().tolist()


def test_the_token_that_is_drawn_leads_and_no_other() -> None:
    """Noise is that of the position after the root's, in the draw and in the margin."""
    for position in range(1, 30):
        served = list(range(VOCAB))
        drawn, margins = judged(position, served)
        pairs = zip(served, drawn, strict=True)
        assert [margin > 0 for margin in margins] == [token == other for token, other in pairs]
        assert len(set(drawn)) <= 3, "of three roots"


def test_a_step_is_padded_as_its_plan_asks_and_its_margins_are_the_hosts_numbers() -> None:
    plan = plan_of(1, [SlotPart(5), SlotPart(7)], 1, extensions=(Replayed([3, 4], [10, 11], [12, 13], padded_to=4),))
    step = AuditHook(ANY, ANY).placed_step(plan)
    assert step is not None and step.size == 4
    assert [*step.laid_out(4, 9)] == [5, 7, 9, 9, 3, 4, 0, 0, 10, 11, 0, 0, 12, 13, 0, 0]
    margins = torch.tensor([0.5, -2.0], dtype=torch.float64).numpy()
    assert step.pack([[1], [2]], 1, memoryview(margins).cast("B"), None) == Margins([0.5, -2.0])
    assert AuditHook(ANY, ANY).placed_step(plan_of(2, [SlotPart(5)], 1)) is None


def settled(device: str, **flags: Any) -> Settings:
    files = ModelFiles(
        weights="/none", config=tiny_config(), tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128,
        preset_draft="/head", preset_spec=("EAGLE3", 3, 1, 4),
    )  # fmt: skip
    return resolve(EngineConfig(device=device, **flags), files, Machine(num_cores=2, has_cuda=device == "cuda"))[0]


def loaded(state: StateShape = NO_STATE) -> LoadedModels:
    target: Any = SimpleNamespace(kv_shape=KVShape(1, 1, 8, state=state))
    return LoadedModels(target, ANY, method_named("EAGLE3"))


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        ("cpu", {"max_running_requests": 64}, Needs(0, 8, (2, 8, 16))),
        ("cpu", {"max_running_requests": 2}, Needs(0, 2, (1, 2, 4))),
        ("cuda", {"max_running_requests": 64}, Needs(0, 32, (8, 32, 128))),
        ("cuda", {"max_running_requests": 20}, Needs(0, 20, (5, 20, 80))),
        ("cuda", {"max_running_requests": 64, "audit_rate": 0.0}, Needs()),
        ("cuda", {"speculative_accept_threshold_single": 0.5}, Needs()),
    ],
)
def test_audits_have_slots_and_batches_by_the_device_unless_nothing_can_be_compared(
    device: str, flags: dict[str, Any], expected: Needs
) -> None:
    assert needs(settled(device, **flags), loaded()) == expected


@pytest.mark.parametrize(("slots", "audits"), [(64, 8), (128, 16), (1024, 32)])
def test_audits_of_layers_that_recur_are_few_on_a_gpu(slots: int, audits: int) -> None:
    settings = settled("cuda", max_running_requests=slots)
    recurs = loaded(StateShape(1, 4, 4, 1, 4, 4))
    assert needs(settings, recurs) == Needs(0, audits, (audits // 4, audits, 128))


def test_what_a_threshold_accepts_is_not_audited_whatever_the_rate() -> None:
    settings = settled("cuda", max_running_requests=64)
    lossy = msgspec.structs.replace(settings.spec, accept=AcceptSettings(threshold_single=0.5))
    models = loaded()
    assert settings.audit.rate and needs(msgspec.structs.replace(settings, spec=lossy), models) == Needs()


def test_audits_attach_where_there_are_slots_for_them_and_tell_which() -> None:
    slots = SlotRows(3, 1, 16, no_processors(VOCAB, num_pages=256, page_size=4), num_placed=8)
    geometry = Geometry(3, 1, 4, 64, 256, 16, torch.float64, placed_slots=8, placed_batches=(2, 8, 16))
    parts = Parts(ANY, TableModel(TABLE), ANY, ANY, slots, geometry)
    hook = attach(parts)
    assert hook is not None and hook.placed is not None
    assert hook.ready() == (AuditRoom(first_slot=4, num_slots=8, control_slots=16),)
    assert attach(replace(parts, geometry=replace(geometry, placed_slots=0, placed_batches=()))) is None

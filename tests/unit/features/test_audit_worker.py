"""A decode step of audits on a model that can be computed by hand: what is drawn, and by how much."""

from unittest.mock import ANY

import torch
from support.fakes import TableModel
from support.no_processors import no_processors
from support.plans import SlotPart, plan_of

from overlap_spec.features.audit.worker import COLUMNS, AuditHook, AuditStep, laid_out
from overlap_spec.messages import Margins, Replayed, ResetSlot, SamplingParams
from overlap_spec.worker.runner import EagerRunner
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import StepShape

VOCAB = 23
TABLE = [(7 * token + 3) % VOCAB for token in range(VOCAB)]
WARM = SamplingParams(temperature=30.0, seed=5)  # the table's token is ahead by 50 / 30: noise often decides


def judged(position: int, served: list[int]) -> tuple[list[int], list[float]]:
    """What a step draws at a position, and the leads of `served`: one slot for each, all of one request."""
    slots = SlotRows(len(served), 1, 16, no_processors(VOCAB, num_pages=256, page_size=4))
    reset = ResetSlot(WARM, position, (), 0)
    pages = [list(range(9 * slot, 9 * slot + 9)) for slot in range(len(served))]
    own = range(len(served))
    plan = plan_of(0, [SlotPart(slot, new_pages=pages[slot], reset=reset) for slot in own], 1)
    count, changes = slots.pack_changes(plan)
    slots.apply(torch.frombuffer(bytearray(changes), dtype=torch.int64), count)
    step = AuditStep(slots, TableModel(TABLE), 4)  # type: ignore[arg-type]
    replayed = Replayed([position] * len(served), [slot % 3 for slot in own], served)
    packed = torch.tensor([*laid_out(own, replayed, len(served), slots.dummy)])
    (part,) = EagerRunner(ANY, ANY, step).forward(StepShape(len(served), 1, 16, placed=True), packed)
    published = part.decide(slots.sampling_work(own))
    return published.rows[:, COLUMNS.tokens].flatten().tolist(), published.outputs[0].flatten().tolist()


def test_the_token_that_is_drawn_leads_and_no_other() -> None:
    """Noise is that of the position after the root's, in the draw and in the margin."""
    for position in range(1, 30):
        served = list(range(VOCAB))
        drawn, leads = judged(position, served)
        assert [lead > 0 for lead in leads] == [token == other for token, other in zip(served, drawn, strict=True)]
        assert len(set(drawn)) <= 3, "of three roots"


def test_a_step_is_padded_as_its_plan_asks_and_its_margins_are_the_hosts_numbers() -> None:
    plan = plan_of(1, [SlotPart(5), SlotPart(7)], 1, extensions=(Replayed([3, 4], [10, 11], [12, 13], padded_to=4),))
    step = AuditHook(ANY).placed_step(plan)
    assert step is not None and step.size == 4
    assert [*step.laid_out(4, 9)] == [5, 7, 9, 9, 3, 4, 0, 0, 10, 11, 0, 0, 12, 13, 0, 0]
    leads = torch.tensor([0.5, -2.0], dtype=torch.float64).numpy()
    assert step.pack([[1], [2]], 1, memoryview(leads).cast("B"), None) == Margins([0.5, -2.0])
    assert AuditHook(ANY).placed_step(plan_of(2, [SlotPart(5)], 1)) is None

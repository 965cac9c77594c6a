"""A decode step of audits on a model that can be computed by hand: what is drawn, and by how much."""

from unittest.mock import ANY

import torch
from support.fakes import TableModel
from support.no_processors import no_processors
from support.plans import SlotPart, plan_of

from overlap_spec.messages import Replayed, ResetSlot, SamplingParams
from overlap_spec.worker.audit import COLUMNS, AuditStep, laid_out
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import EagerRunner, StepShape

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
    published = part.decide(slots.sampling_work(own)).rows
    return published[:, COLUMNS.tokens].flatten().tolist(), published[:, -1].view(torch.float64).tolist()


def test_the_token_that_is_drawn_leads_and_no_other() -> None:
    """Noise is that of the position after the root's, in the draw and in the margin."""
    for position in range(1, 30):
        served = list(range(VOCAB))
        drawn, leads = judged(position, served)
        assert [lead > 0 for lead in leads] == [token == other for token, other in zip(served, drawn, strict=True)]
        assert len(set(drawn)) <= 3, "of three roots"

"""Stages and outputs of features: in which order they are applied, and from which logits outputs are written."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.no_processors import no_processors
from torch import Tensor

from overlap_spec.messages import SamplingParams
from overlap_spec.sampling.context import DrawContext, History, SamplingWork
from overlap_spec.sampling.stages import KeptLogits
from overlap_spec.worker.slots import SlotRows


@dataclass(frozen=True)
class Digit:
    """Appends a digit to every logit."""

    digit: int
    name = "digit"
    target_only = True

    def asked(self, sampling: SamplingParams) -> bool:
        return sampling.top_k == self.digit

    def apply(self, logits: Tensor, context: DrawContext) -> Tensor:
        return logits * 10 + self.digit


def slot_rows(*digits: int) -> SlotRows:
    slots = SlotRows(2, 1, 4, no_processors(8))
    slots.draw_through(tuple(map(Digit, digits)))
    return slots


def applied(slots: SlotRows, work: SamplingWork, of_target: bool) -> float:
    ones = torch.zeros(1, dtype=torch.int64)
    history = History(slots.sampling(ones, work), torch.zeros(1, 4, dtype=torch.int32), ones)
    context = DrawContext(history, torch.arange(8), ones[:, None], of_target=of_target)
    return float(slots.processors.apply(torch.zeros(1, 1, 8), context)[0, 0, 0])


def test_stages_are_applied_in_their_order_and_to_the_targets_rows_alone() -> None:
    slots, asking = slot_rows(1, 2, 3), SamplingWork(False, False, False, of_target=True)
    assert applied(slots, asking, of_target=True) == 123
    assert applied(slots, asking, of_target=False) == 0
    assert applied(slots, SamplingWork(False, False, False), of_target=True) == 0


@pytest.mark.parametrize(("top_k", "expected"), [(2, True), (3, False)])
def test_a_kind_of_sampling_has_stages_if_a_request_asks_for_one(top_k: int, expected: bool) -> None:
    assert slot_rows(1, 2)._asked_work(SamplingParams(top_k=top_k)).of_target is expected


def test_logits_that_are_kept_are_computed_once() -> None:
    computed = []

    class Lazy:
        def compute(self) -> Tensor:
            computed.append(1)
            return torch.eye(3)

    lazy: Any = Lazy()
    kept = KeptLogits(lazy)
    assert kept.compute() is kept.compute() and kept.argmax().tolist() == [0, 1, 2] and len(computed) == 1

"""What is run once more after captures: steps of every size that no graph holds, and none that is too long."""

from types import SimpleNamespace

import pytest
import torch

from overlap_spec.messages import StepPlan
from overlap_spec.worker.geometry import Geometry
from overlap_spec.worker.warmup import SMALL_STEP, _run_uncaptured


class Recorder:
    """Counts the prompt tokens of each step instead of running it."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def launch(self, plan: StepPlan) -> SimpleNamespace:
        self.steps.append([len(work.prompt_chunk) // 4 for work in plan.work])
        return SimpleNamespace(wait=lambda: None)


def geometry(num_slots: int, max_chunk: int, max_len: int) -> Geometry:
    return Geometry(num_slots, 4, 16, max_len, 100, max_chunk, torch.float32)


@pytest.mark.parametrize(("num_slots", "max_chunk", "max_len"), [(48, 8192, 131072), (4, 5, 120), (300, 64, 500)])
def test_sizes(num_slots: int, max_chunk: int, max_len: int) -> None:
    recorder = Recorder()
    _run_uncaptured(recorder, geometry(num_slots, max_chunk, max_len))
    together = sorted({sum(tokens) for tokens in recorder.steps if len(tokens) > 1})
    alone = sorted({tokens[0] for tokens in recorder.steps if len(tokens) == 1})
    assert max(together + alone) <= min(max_chunk, max_len - 1) and max_chunk in alone
    assert together[0] == min(num_slots, max_chunk)
    if max_chunk > SMALL_STEP:
        assert max(together) > 0.7 * SMALL_STEP
        assert all(after <= 1.25 * before for before, after in zip(alone[:-2], alone[1:-1], strict=True))

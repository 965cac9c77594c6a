"""What is run once more after captures, and how steps are timed: figures that a disturbance does not reach."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from overlap_spec.messages import StepPlan
from overlap_spec.worker.sizing import warmup
from overlap_spec.worker.sizing.geometry import Geometry
from overlap_spec.worker.sizing.warmup import SMALL_STEP, _run_uncaptured, measure_steps


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


@pytest.mark.parametrize("begin", range(12))
def test_a_disturbance_shorter_than_a_round_is_in_no_figure(begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter(range(100))

    def seconds(executor: object, geometry: Geometry, size: int, width: int, num_steps: int) -> float:
        disturbed = begin <= next(measured) < begin + 6  # two sizes and three widths are a round
        return (size + width) * (10 if disturbed else 1)

    monkeypatch.setattr(warmup, "_step_seconds", seconds)
    on_cpu = SimpleNamespace(slots=SimpleNamespace(length=SimpleNamespace(is_cuda=False)))
    costs = measure_steps(on_cpu, replace(geometry(8, 64, 500), narrower=(1, 2)), ())
    assert (costs.batch_sizes, costs.widths) == ((1, 4), (1, 2, 4))
    assert costs.seconds == ((2, 3, 5), (5, 6, 8))

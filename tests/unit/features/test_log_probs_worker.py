"""Which slots have log-probs in the worker: those whose requests ask, from the step that they take their slots in."""

import torch

from overlap_spec.features.log_probs.worker import LogProbOutput, LogProbSteps
from overlap_spec.messages import LogProbParams, ResetSlot, SamplingParams, StepPlan
from overlap_spec.worker.devices import CpuDevice

LISTED = LogProbParams(top=1, token_ids=(5, 6))


def steps() -> tuple[LogProbSteps, LogProbOutput]:
    output = LogProbOutput(4, 10, torch.device("cpu"))
    return LogProbSteps(output, CpuDevice()), output


def takes(steps: LogProbSteps, **asked: LogProbParams | None) -> None:
    """Requests take slots, which are named s0, s1, .."""
    resets = {int(slot[1:]): ResetSlot(SamplingParams(log_probs=each), 1, (), 1) for slot, each in asked.items()}
    steps.changed(StepPlan(1, 1, resets=resets))


def test_a_step_packs_for_slots_that_ask_and_for_no_others() -> None:
    hook, output = steps()
    assert output.packer([0, 1], []) is None
    takes(hook, s1=LISTED, s2=None)
    assert output.packer([0, 2], []) is None
    packer = output.packer([0, 1, 2], [0, 3, 0])
    assert packer is not None and packer.asked == [None, LISTED, None] and packer.prompt_counts == [0, 3, 0]
    assert output.listed[1, :2].tolist() == [5, 6] and output.listed[2, 0] == -1


def test_the_next_request_of_a_slot_asks_for_itself_and_a_step_in_flight_keeps_what_it_was_asked_for() -> None:
    hook, output = steps()
    takes(hook, s1=LISTED)
    in_flight = output.packer([1], [])
    takes(hook, s1=None)
    assert output.packer([1], []) is None
    assert in_flight is not None and in_flight.asked == [LISTED]


def test_a_request_is_of_the_kind_with_outputs_if_it_asks() -> None:
    _, output = steps()
    assert output.asked(SamplingParams(log_probs=LISTED)) and not output.asked(SamplingParams())

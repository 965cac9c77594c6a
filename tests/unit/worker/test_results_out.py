"""What a step publishes lies where the next step's graphs write: it is copied before they run, or it is lost."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from support.graph_runners import runner_of
from support.plans import plan_of, windows
from support.prompt_plans import SAMPLINGS, fresh, prompt
from support.replayed_parts import ReplayedParts
from support.ring import RingConfig, tiny_loaded
from torch import Tensor

from overlap_spec.worker.build import build_executor
from overlap_spec.worker.decode import Forwarded
from overlap_spec.worker.devices import CpuDevice, CpuDownload, Download
from overlap_spec.worker.executor import Executor

STEPS = 12
Result = TypeVar("Result")


class SharedMemory(ReplayedParts):
    """What a step publishes lies where the layers, replayed the next time, have put their rows before."""

    def record(self, part: str, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        replay, result = super().record(part, work)

        def replay_over() -> None:
            replay()
            if part == "layers" and isinstance(result, tuple) and isinstance(result[0], Forwarded):
                result[0].verdict.published.rows.fill_(1 << 40)  # as rows of bfloat16 look: no token

        return replay_over, result


class CopyingDevice(CpuDevice):
    """Copies when it is told to, as a stream does: behind what was enqueued before, ahead of what follows."""

    asynchronous = True

    def download(self, tensor: Tensor, *beside: Tensor) -> Download:
        return CpuDownload(tensor.clone(), tuple(each.clone() for each in beside))


class LateDevice(CpuDevice):
    """Copies when the result is read, as a stream of its own may."""

    asynchronous = True


def executor_of(num_steps: int) -> Executor:
    config = RingConfig(num_steps=num_steps, num_slots=10, num_pages=401)
    return build_executor(tiny_loaded(1, num_steps), config.geometry(), torch.device("cpu"))


def tokens(executor: Executor, in_flight: int) -> list[list[list[int]]]:
    """Of two requests; a result is read when so many later steps have been launched."""
    width, slots = executor.slots.width, (0, 1)
    prompts = [fresh(slot, prompt(slot, 5 + slot), SAMPLINGS["greedy"]) for slot in slots]
    plans = [plan_of(1, prompts, width)]
    plans += [windows(2 + step, slots, width) for step in range(STEPS)]
    handles, found = [], []
    for plan in plans:
        handles.append(executor.launch(plan))
        if len(handles) > in_flight:
            found.append(handles.pop(0).wait().tokens)
    return found + [handle.wait().tokens for handle in handles]


def replaying(num_steps: int, device: CpuDevice) -> Executor:
    executor = executor_of(num_steps)
    runner = runner_of(executor, batches=(1, 2))
    runner.capture(SharedMemory())
    executor.use(runner)
    executor.device = device
    return executor


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_copy_in_the_order_of_the_steps_is_safe(num_steps: int) -> None:
    expected = tokens(executor_of(num_steps), in_flight=0)
    for in_flight in (0, 1, 2):
        assert tokens(replaying(num_steps, CopyingDevice()), in_flight) == expected


def test_a_later_copy_is_not() -> None:
    assert tokens(replaying(0, LateDevice()), in_flight=1) != tokens(executor_of(0), in_flight=0)

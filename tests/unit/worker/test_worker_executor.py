"""Steps on a model that can be computed by hand: what is committed, in which order it leaves, what a reset clears."""

from array import array
from collections.abc import Iterator

import pytest
import torch
from fakes import ScriptedProposer, TableModel

from overlap_spec.messages import Phase, ResetSlot, SamplingParams, SlotWork, StepPlan
from overlap_spec.spec.interfaces import SpecMethod
from overlap_spec.spec.types import SAMPLING_WORK
from overlap_spec.spec.verifier import ChainVerifier
from overlap_spec.worker.devices import CpuDevice
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.slots import SlotRows

TABLE = [(7 * token + 3) % 23 for token in range(23)]
WIDTH = 4
GREEDY = SamplingParams(temperature=0.0, seed=0)


def pack(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


class Bench:
    """An executor over hand-computable parts, driven plan by plan."""

    def __init__(self) -> None:
        self.model = TableModel(TABLE)
        self.slots = SlotRows(3, WIDTH, 16, torch.device("cpu"))
        proposer = ScriptedProposer(self.model, self.slots.window, WIDTH - 1)
        method = SpecMethod(proposer, ChainVerifier(torch.arange(len(TABLE))))
        self.executor = Executor(CpuDevice(), self.slots, self.model, method, page_size=4)
        self.steps = 0

    def plan(self, phase: Phase, work: list[SlotWork], width: int = WIDTH) -> StepPlan:
        self.steps += 1
        return StepPlan(self.steps, phase, work, width)

    def run(self, plan: StepPlan) -> list[list[int]]:
        """A step to its very end: tokens leave before the slot rows are at rest."""
        handle = self.executor.launch(plan)
        tokens = handle.wait().tokens
        handle.finished.result()
        return tokens

    def prefill(self, slot: int, prompt: list[int], sampling: SamplingParams = GREEDY) -> list[list[int]]:
        reset = ResetSlot(sampling, len(prompt), (), len(prompt) + sampling.min_new_tokens)
        work = SlotWork(slot=slot, new_pages=[1, 2, 3, 4], prompt_chunk=pack(prompt), reset=reset)
        return self.run(self.plan(Phase.PREFILL, [work]))

    def decode(self, *slots: int, width: int = WIDTH) -> list[list[int]]:
        plan = self.plan(Phase.DECODE, [SlotWork(slot=slot) for slot in slots], width)
        return self.run(plan)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.executor.close()


def test_committed_tokens_are_the_tables_walk(bench: Bench) -> None:
    first = bench.prefill(0, [5, 6, 9])[0]
    out = first + [token for _ in range(6) for token in bench.decode(0)[0]]
    assert out == bench.model.walk(9, len(out))
    assert len(out) > 7  # some guesses stood


def test_run_lengths_follow_the_script(bench: Bench) -> None:
    bench.prefill(0, [1, 2, 3])  # the root is at position 3: 3 right guesses
    assert len(bench.decode(0)[0]) == 4  # then at 7: 3 again, at 11, ..
    bench.prefill(1, [1, 2, 3, 4])  # root at 4: none right
    assert [len(run) for run in bench.decode(1, 0)] == [1, 4]


def test_a_plan_is_answered_in_plan_order(bench: Bench) -> None:
    bench.prefill(0, [1])
    bench.prefill(2, [2])
    together = bench.decode(2, 0)
    assert together[0][0] == bench.model.walk(2, 2)[1]
    assert together[1][0] == bench.model.walk(1, 2)[1]


def test_chunks_commit_nothing_until_the_prompt_is_complete(bench: Bench) -> None:
    reset = ResetSlot(GREEDY, 5, (), 5)
    chunk = SlotWork(slot=0, new_pages=[1], prompt_chunk=pack([1, 2, 3]), next_token=4, reset=reset)
    rest = SlotWork(slot=0, new_pages=[2], start=3, prompt_chunk=pack([4, 5]))
    assert bench.run(bench.plan(Phase.PREFILL, [chunk])) == [[]]
    assert bench.run(bench.plan(Phase.PREFILL, [rest])) == [bench.model.walk(5, 1)]
    assert bench.slots.length[0] == 5
    assert bench.slots.page_table[0, :3].tolist() == [1, 2, 0]


def test_two_steps_in_flight_give_the_same_tokens(bench: Bench) -> None:
    first = bench.prefill(0, [5, 6, 9])[0]
    plans = [bench.plan(Phase.DECODE, [SlotWork(slot=0)]) for _ in range(4)]
    handles = [bench.executor.launch(plan) for plan in plans]
    out = first + [token for handle in handles for token in handle.wait().tokens[0]]
    assert out == bench.model.walk(9, len(out))


def test_a_narrow_step_verifies_fewer_guesses(bench: Bench) -> None:
    bench.prefill(0, [1, 2, 3])
    assert len(bench.decode(0, width=2)[0]) == 2
    assert len(bench.decode(0, width=1)[0]) == 1


def test_a_reset_leaves_nothing_of_the_predecessor(bench: Bench) -> None:
    bench.prefill(0, [1, 2, 3], SamplingParams(temperature=1.0, top_k=3, seed=9, min_new_tokens=2))
    bench.decode(0)
    bench.prefill(0, [8])
    assert bench.slots.length[0] == 1
    work = bench.slots.sampling_work([SlotWork(slot=0)])
    assert work == SAMPLING_WORK[0]
    assert bench.slots.batch(torch.tensor([0]), work).sampling.temperature.tolist() == [0.0]
    assert bench.decode(0)[0][0] == bench.model.walk(8, 2)[1]


def test_an_exception_reaches_whoever_waits(bench: Bench) -> None:
    plan = bench.plan(Phase.DECODE, [SlotWork(slot=2)])  # never reset
    handle = bench.executor.launch(plan)
    with pytest.raises(KeyError):
        handle.wait()
    assert isinstance(handle.finished.exception(), KeyError)

"""Steps on a model that can be computed by hand: what is committed, in which order it leaves, what a reset clears."""

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from overlap_spec_kernels import Published
from support.fakes import ScriptedProposer, TableModel
from support.graph_runners import counted
from support.no_processors import no_processors
from support.plans import SlotPart, plan_of
from torch import Tensor

from overlap_spec.messages import ResetSlot, SamplingParams, StepPlan
from overlap_spec.sampling.context import EVERY_WORK, GREEDY_WORK, SamplingWork
from overlap_spec.speculative.interfaces import Guesses, SlotBatch, SpecMethod
from overlap_spec.speculative.verifiers import ChainVerifier
from overlap_spec.worker.decode import DecodeStep, Forwarded
from overlap_spec.worker.devices import CpuDevice
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.inputs import DraftLag, StepInputs
from overlap_spec.worker.prefill import PrefillStep
from overlap_spec.worker.runner import EagerRunner
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import StepHandle, StepShape

TABLE = [(7 * token + 3) % 23 for token in range(23)]
WIDTH = 4
GREEDY = SamplingParams(temperature=0.0, seed=0)


def pack(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


class Bench:
    """An executor over hand-computable parts, driven plan by plan."""

    def __init__(self, device: CpuDevice | None = None, model: TableModel | None = None) -> None:
        self.model = model or TableModel(TABLE)
        self.slots = SlotRows(3, WIDTH, 16, no_processors(len(TABLE), page_size=4))
        proposer = ScriptedProposer(self.model, self.slots.window, WIDTH - 1)
        method = SpecMethod(proposer, ChainVerifier(torch.arange(len(TABLE))))
        steps = DecodeStep(self.slots, self.model, method, 4), PrefillStep(self.slots, self.model, method, 4)
        self.executor = Executor(device or CpuDevice(), self.slots, *steps)
        self.steps = 0

    def plan(self, work: list[SlotPart], width: int = WIDTH) -> StepPlan:
        self.steps += 1
        return plan_of(self.steps, work, width, first_width=width)

    def run(self, plan: StepPlan) -> list[list[int]]:
        """A step to its very end: tokens leave before the slot rows are at rest."""
        return self.executor.launch(plan).wait().tokens

    def prefill(
        self, slot: int, prompt: list[int], sampling: SamplingParams = GREEDY, width: int = WIDTH
    ) -> list[list[int]]:
        return self.run(self.prompt(slot, prompt, sampling=sampling, width=width))

    def prompt(
        self, slot: int, prompt: list[int], *beside: int, sampling: SamplingParams = GREEDY, width: int = WIDTH
    ) -> StepPlan:
        """A step of a whole prompt. `beside`: slots whose windows the step has too."""
        reset = ResetSlot(sampling, len(prompt), (), len(prompt) + sampling.min_new_tokens)
        work = SlotPart(slot=slot, new_pages=[1, 2, 3, 4], tokens=pack(prompt), reset=reset)
        return self.plan([*map(SlotPart, beside), work], width)

    def decode(self, *slots: int, width: int = WIDTH) -> list[list[int]]:
        plan = self.plan([SlotPart(slot=slot) for slot in slots], width)
        return self.run(plan)


class DividingModel(TableModel):
    """Divides attention by length, which nothing here reads."""

    def divide(self, lengths: Tensor, page_table: Tensor, width: int) -> Tensor:
        assert len(lengths) == len(page_table)
        return lengths * 100 + width


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


@pytest.mark.parametrize("width", [1, 2, WIDTH])
def test_a_prompt_proposes_as_many_columns_as_its_plan_is_wide(bench: Bench, width: int) -> None:
    """What was proposed in the slot before is gone; the next step may be wider."""
    bench.prefill(0, [5, 6, 9])
    first = bench.prefill(0, [1, 2, 3], width=width)[0]  # the root is at position 3: 3 right guesses
    walk = bench.model.walk(3, WIDTH)
    assert bench.slots.window[0].tolist() == [*walk[:width], *[-1] * (WIDTH - width)]
    assert first + bench.decode(0)[0] == bench.model.walk(3, width + 1)


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
    chunk = SlotPart(slot=0, new_pages=[1], tokens=pack([1, 2, 3]), next_token=4, reset=reset)
    rest = SlotPart(slot=0, new_pages=[2], start=3, tokens=pack([4, 5]))
    assert bench.run(bench.plan([chunk])) == [[]]
    assert bench.run(bench.plan([rest])) == [bench.model.walk(5, 1)]
    assert bench.slots.length[0] == 5
    assert bench.slots.page_table[0, :3].tolist() == [1, 2, 0]


def test_two_steps_in_flight_give_the_same_tokens(bench: Bench) -> None:
    first = bench.prefill(0, [5, 6, 9])[0]
    plans = [bench.plan([SlotPart(slot=0)]) for _ in range(4)]
    handles = [bench.executor.launch(plan) for plan in plans]
    out = first + [token for handle in handles for token in handle.wait().tokens[0]]
    assert out == bench.model.walk(9, len(out))


def test_attention_is_divided_once_a_step_for_target_and_draft() -> None:
    bench, batches = Bench(model=DividingModel(TABLE)), []
    proposer = bench.executor.decode_step.method.proposer
    propose = proposer.propose

    def noting(batch: SlotBatch, learnt: Tensor, num_guesses: int) -> Guesses:
        batches.append(batch)
        return propose(batch, learnt, num_guesses)

    with patch.object(proposer, "propose", noting):
        bench.prefill(0, [1, 2, 3])
        bench.prefill(1, [1, 2, 3, 4])
        bench.decode(1, 0)
    bench.executor.close()
    assert [batch.shares is not None and batch.shares.tolist() for batch in batches] == [[301], [401], [404, 304]]


def test_a_narrow_step_verifies_fewer_guesses(bench: Bench) -> None:
    bench.prefill(0, [1, 2, 3])
    assert len(bench.decode(0, width=2)[0]) == 2
    assert len(bench.decode(0, width=1)[0]) == 1


def test_a_reset_leaves_nothing_of_the_predecessor(bench: Bench) -> None:
    bench.prefill(0, [1, 2, 3], SamplingParams(temperature=1.0, top_k=3, seed=9, min_new_tokens=2))
    bench.decode(0)
    bench.prefill(0, [8])
    assert bench.slots.length[0] == 1
    work = bench.slots.sampling_work([0])
    assert work == GREEDY_WORK
    assert bench.slots.batch(torch.tensor([0]), EVERY_WORK).sampling.temperature.tolist() == [0.0]
    assert bench.decode(0)[0][0] == bench.model.walk(8, 2)[1]


def test_an_exception_reaches_whoever_waits(bench: Bench) -> None:
    plan = bench.plan([SlotPart(slot=2)])  # never reset
    with pytest.raises(KeyError):
        bench.executor.launch(plan)


class CountingDevice(CpuDevice):
    """Counts what a step brings to the device."""

    num_uploads = 0

    def upload(self, values: "array[int]") -> torch.Tensor:
        self.num_uploads += 1
        return super().upload(values)


def test_a_step_on_the_same_slots_uploads_nothing() -> None:
    device = CountingDevice()
    bench = Bench(device)
    bench.prefill(0, [1, 2, 3])
    bench.prefill(1, [4, 5])
    out = [bench.decode(0, 1), bench.decode(0, 1), bench.decode(0, 1)]
    assert device.num_uploads == 3  # two prompts, and once the slots
    bench.run(bench.plan([SlotPart(slot=0, new_pages=[9]), SlotPart(slot=1)]))
    assert bench.slots.page_table[0, 4] == 9
    bench.decode(0, 1)
    assert device.num_uploads == 4  # and once a page
    bench.decode(1)
    assert device.num_uploads == 5
    committed = [token for step in out for token in step[0]]
    assert committed == bench.model.walk(3, len(committed) + 1)[1:]


def test_new_sampling_in_an_old_slot_counts(bench: Bench) -> None:
    """The slots of the step before are kept on the device, but how they sample may have changed since."""
    bench.prefill(0, [1, 2, 3])
    bench.decode(0)
    asked: list[SamplingWork] = []

    class Asked(DecodeStep):
        def decide(self, forwarded: Forwarded, sampling: SamplingWork) -> Published:
            asked.append(sampling)
            return super().decide(forwarded, sampling)

    step = Asked(bench.slots, bench.model, bench.executor.decode_step.method, 4)
    bench.executor.use(EagerRunner(step, bench.executor.prefill_step))
    bench.prefill(0, [1, 2, 3], SamplingParams(temperature=1.0, top_k=2, seed=1))
    bench.decode(0)
    assert asked == [SamplingWork(True, True, False)]


def test_times_of_a_step_are_in_order(bench: Bench) -> None:
    """All of the device's time is somebody's: work, or a gap."""
    bench.prefill(0, [1, 2, 3])
    handles = [bench.executor.launch(bench.plan([SlotPart(slot=0)])) for _ in range(3)]
    results = [handle.wait() for handle in handles]
    for handle in handles:
        host = handle.host
        assert 0 < host.received <= host.launch_begin <= host.launch_end <= host.published
    first, last = handles[0].device, handles[-1].device
    accounted = sum(result.gpu_time + result.gpu_gap for result in results[1:])
    assert accounted == pytest.approx(last.decided.since(first.decided), abs=1e-6)
    assert all(result.gpu_time > 0 and result.gpu_gap >= 0 for result in results)


@pytest.mark.parametrize("together", [True, False])
def test_the_parts_of_a_step_take_their_times_one_after_the_other(
    bench: Bench, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows first. Whatever runs them, each has a result of its own, and their times add up to the step's."""
    if not together:

        def of_one_part(exact: StepShape, _: object) -> StepShape | None:
            return None if exact.has_both else exact

        monkeypatch.setattr(bench.executor.eager, "shape_for", of_one_part)
    runner = counted(bench.executor)
    bench.prefill(0, [1, 2, 3])
    handles = [bench.executor.launch(bench.plan([SlotPart(0)]))]
    published: list[StepHandle] = []
    launch = bench.executor.start(bench.prompt(1, [4, 5], 0), published.append)
    assert launch.advance() and published == list(launch.handles) and runner.num_together == together
    handles += [*launch.handles, bench.executor.launch(bench.plan([SlotPart(0), SlotPart(1)]))]
    results = [handle.wait() for handle in handles]
    assert [(result.step_id, result.is_last) for result in results] == [(2, True), (3, False), (3, True), (4, True)]
    assert [len(result.tokens) for result in results] == [1, 1, 1, 2] and results[2].tokens == [[TABLE[5]]]
    accounted = sum(result.gpu_time + result.gpu_gap for result in results[1:])
    assert accounted == pytest.approx(handles[-1].device.decided.since(handles[0].device.decided), abs=1e-6)
    windows, prompts = (handle.host for handle in launch.handles)
    assert windows.launch_begin < windows.launch_end <= prompts.launch_begin < prompts.launch_end


@pytest.mark.parametrize("asynchronous", [False, True])
def test_only_windows_alone_on_cuda_are_drafted_for_before_their_tokens_are_handed_over(asynchronous: bool) -> None:
    """On a CPU tokens would wait for the draft. Beside prompts, and of these, launching a draft takes the host long."""
    device = CpuDevice()
    device.asynchronous = asynchronous
    bench, noted = Bench(device), list[str]()
    proposer = bench.executor.decode_step.method.proposer
    propose = proposer.propose

    def noting(batch: SlotBatch, learnt: Tensor, num_guesses: int) -> Guesses:
        noted.append("draft")
        return propose(batch, learnt, num_guesses)

    def orders(plan: StepPlan) -> list[str]:
        noted.clear()
        handles = bench.executor.start(plan, lambda handle: noted.append(handle.plan.phase.value))
        assert handles.advance()
        return noted.copy()

    with patch.object(proposer, "propose", noting):
        assert orders(bench.prompt(0, [1, 2, 3])) == ["prefill", "draft"]
        assert orders(bench.plan([SlotPart(0)])) == (["draft", "decode"] if asynchronous else ["decode", "draft"])
        assert orders(bench.prompt(1, [4, 5], 0)) == ["decode", "prefill", "draft", "draft"]


def test_windows_and_prompts_travel_in_one_copy() -> None:
    device = CountingDevice()
    bench = Bench(device)
    bench.prefill(0, [1, 2, 3])
    bench.decode(0)
    before = device.num_uploads
    launch = bench.executor.start(bench.prompt(2, [4, 5], 0))
    assert launch.advance() and device.num_uploads == before + 1
    assert [len(handle.wait().tokens) for handle in launch.handles] == [1, 1]
    bench.decode(0, 2)
    assert device.num_uploads == before + 2, "the slots again: prompts may change how they sample"


def test_a_slot_that_is_left_out_is_written_nowhere_but_in_its_window() -> None:
    """The dummy slot and the dummy page take its place in what follows the layers, until it is put back."""
    inputs = StepInputs(SimpleNamespace(dummy=9), SimpleNamespace(), DraftLag(0))
    slots, tables = torch.tensor([3, 7, 5]), torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    batch, handle = SimpleNamespace(slots=slots, page_table=tables), SimpleNamespace()
    part = SimpleNamespace(rows=SimpleNamespace(batch=batch))
    handle.left_out = {1: 7}
    inputs.leave_out(handle, part, CpuDevice())
    assert slots.tolist() == [3, 9, 5] and tables.tolist() == [[1, 2], [0, 0], [5, 6]]
    inputs.launched(SimpleNamespace(has_windows=False, chunks=None))
    assert slots.tolist() == [3, 7, 5]


def test_windows_of_the_same_slots_are_laid_out_once_until_they_get_pages() -> None:
    bench = Bench()
    for slot in (0, 1):
        bench.prefill(slot, [5, 6])
    with patch.object(EagerRunner, "shape_for", autospec=True, side_effect=lambda runner, exact, pages: exact) as asked:
        for width, new in ((4, 1), (4, 0), (2, 1), (4, 0), (2, 0)):
            bench.decode(0, 1, width=width)
            assert asked.call_count == new, "once for each width"
            asked.reset_mock()
        bench.run(bench.plan([SlotPart(slot=0, new_pages=[5]), SlotPart(slot=1)]))
        assert asked.call_count == 1, "a slot that has more pages may need longer page tables"
        bench.decode(0, 1, width=2)
        assert asked.call_count == 2, "at every width"
        bench.executor.use(EagerRunner(bench.executor.decode_step, bench.executor.prefill_step))
        bench.decode(0, 1)
        assert asked.call_count == 3, "another runner lays steps out in its own way"
        bench.decode(1, 0)
        assert asked.call_count == 4, "other slots"

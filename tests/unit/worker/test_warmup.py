"""What is run once more after captures, and how steps are timed: figures that a disturbance does not reach."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.plans import parts_of

from overlap_spec.features.log_probs.worker import LogProbOutput
from overlap_spec.messages import NEVER_S, Phase, PrefillCosts, StepCosts, StepPlan
from overlap_spec.worker.hooks import Hooks
from overlap_spec.worker.startup import step_times, warmup
from overlap_spec.worker.startup.geometry import Geometry
from overlap_spec.worker.startup.step_times import (
    COST_CONTEXT,
    PROBE_CONTEXT,
    _agreed,
    _steps,
    again,
    measure_chunk,
    measure_prefill,
    measure_steps,
    queued_steps,
)
from overlap_spec.worker.startup.warmup import SMALL_STEP, prepare, run_uncaptured

OUT = SimpleNamespace(outputs=(LogProbOutput(1, 100, torch.device("cpu")),), num_pages=1)  # of the slots


class Recorder:
    """Counts the prompt tokens of each step instead of running it. `captured`: those of steps that graphs hold."""

    slots = OUT
    hooks = Hooks()

    def __init__(self, captured: int = 0) -> None:
        self.steps: list[list[int]] = []
        self.pages: list[int] = []
        self.widths: list[tuple[int, int]] = []  # prompts, and the width that they propose for
        self.runner = SimpleNamespace(
            shape_for=lambda exact, most_pages: exact, replays=lambda shape: shape.prompt_rows <= captured
        )

    def launch(self, plan: StepPlan) -> SimpleNamespace:
        self.steps.append([len(work.tokens) // 4 for work in parts_of(plan)])
        self.pages.append(sum(len(work.new_pages) for work in parts_of(plan)))
        self.widths.append((len(plan.chunks), plan.width))
        return SimpleNamespace(wait=lambda: None)


PHASES = {  # what a start runs, says (:) and ends (.), by device and graphs
    ("cpu", ()): ":warming up|warm_up|.warm-up 0|capture_graphs",
    ("cuda", ()): ":compiling kernels|.kernels 0|:warming up|warm_up|.warm-up 3|capture_graphs|.kernels 0",
    (
        "cuda",
        (1,),
    ): ":compiling kernels|.kernels 0|:warming up|warm_up|.warm-up 3|:capturing CUDA graphs|capture_graphs|"
    ".CUDA graphs 3|run_uncaptured|.long steps 3|.kernels 0",
}


@pytest.mark.parametrize(("device", "graphs"), PHASES)
def test_a_start_says_what_it_does_in_its_order(
    device: str, graphs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tells what captures and the steps beside them take."""
    noted, free = list[str](), iter((100, 40))

    def noting(name: str) -> Callable[..., str]:
        return lambda *given, **named: noted.append(name) or name

    for name in ("warm_up", "capture_graphs", "run_uncaptured"):
        monkeypatch.setattr(warmup, name, noting(name))
    monkeypatch.setattr(warmup, "precompiling", lambda *given: nullcontext(lambda: 3))
    monkeypatch.setattr(warmup, "free_bytes", lambda _: next(free))
    settings: Any = SimpleNamespace(model=SimpleNamespace(device=device), graph_batch_sizes=graphs)
    executor: Any = Recorder()
    found = prepare(
        settings,
        executor,
        geometry(4, 5, 120),
        lambda what, done, of: noted.append(f":{what}"),
        lambda phase, compiling: noted.append(f".{phase} {compiling:g}"),
    )
    assert "|".join(noted) == PHASES[device, graphs]
    assert found == ("capture_graphs", 60 if device == "cuda" else 0)


def geometry(num_slots: int, max_chunk: int, max_len: int) -> Geometry:
    return Geometry(num_slots, 4, 16, max_len, 100, max_chunk, torch.float32)


@pytest.mark.parametrize(("num_slots", "max_chunk", "max_len"), [(48, 8192, 131072), (4, 5, 120), (300, 64, 500)])
def test_sizes(num_slots: int, max_chunk: int, max_len: int) -> None:
    recorder = Recorder()
    run_uncaptured(recorder, geometry(num_slots, max_chunk, max_len))
    together = sorted({sum(tokens) for tokens in recorder.steps if len(tokens) > 1})
    alone = sorted({tokens[0] for tokens in recorder.steps if len(tokens) == 1})
    assert max(together + alone) <= min(max_chunk, max_len - 1) and max_chunk in alone
    assert together[0] == min(num_slots, max_chunk)
    if max_chunk > SMALL_STEP:
        assert max(together) > 0.7 * SMALL_STEP
        assert all(after <= 1.25 * before for before, after in zip(alone[:-2], alone[1:-1], strict=True))


def test_many_long_prompts_are_run() -> None:
    """So many programs share their attention that none splits its keys: a kernel of its own, which one prompt lacks."""
    recorder = Recorder(captured=4096)
    run_uncaptured(recorder, geometry(48, 8192, 131072))
    assert recorder.steps[1] == [8192 // 48] * 48


def test_prompts_propose_for_every_narrower_window() -> None:
    """Alone and together: no graph does, and masks of another number are other rows to attend."""
    recorder, sized = Recorder(captured=4096), replace(geometry(48, 8192, 131072), narrower=(1, 2, 3))
    run_uncaptured(recorder, sized)
    assert {(prompts, width) for prompts in (1, 48) for width in (1, 2, 3, 4)} <= set(recorder.widths)


def test_only_one_step_of_many_prompts_writes_whole_page_tables() -> None:
    """Those of 256 slots with 131,072 positions are two million pages, which take the host a tenth of a second."""
    recorder, sized = Recorder(), geometry(256, 8192, 131072)
    run_uncaptured(recorder, sized)
    assert recorder.pages[:2] == [sized.num_page_columns * count for count in (1, 256)]
    assert max(recorder.pages[2:]) < 10_000 and len(recorder.pages) > 10


def test_what_graphs_hold_is_run_once_in_each_kind_and_not_in_each_size() -> None:
    sized, recorders = geometry(48, 8192, 131072), (Recorder(), Recorder(captured=1024))
    for recorder in recorders:
        run_uncaptured(recorder, sized)
    every, some = (recorder.steps for recorder in recorders)
    assert some == every[:4] + [tokens for tokens in every[4:] if sum(tokens) > 1024]
    assert [len(tokens) for tokens in some[:4]] == [1, 48, 48, 48]


@pytest.mark.parametrize("begin", range(12))
def test_a_disturbance_shorter_than_a_round_is_in_no_figure(begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter(range(100))

    def seconds(executor: object, geometry: Geometry, size: int, queued: bool) -> list[float]:
        disturbed = [begin <= next(measured) < begin + 6 for _ in geometry.step_widths]  # two sizes are a round
        return [(size + w) * (10 if bad else 1) for w, bad in zip(geometry.step_widths, disturbed, strict=True)]

    monkeypatch.setattr(step_times, "_steps", seconds)
    on_cpu = SimpleNamespace(slots=SimpleNamespace(length=SimpleNamespace(is_cuda=False)), is_self_drafting=False)
    costs = measure_steps(on_cpu, replace(geometry(8, 64, 500), narrower=(1, 2)), ())
    assert (costs.batch_sizes, costs.widths) == ((1, 4), (1, 2, 4))
    assert costs.seconds == ((2, 3, 5), (5, 6, 8))


@pytest.mark.parametrize(
    ("max_len", "start", "steps"),
    [
        (500, COST_CONTEXT, ["prefill", 4, 2, 1]),
        (100, 91, ["prefill", 4, 2, 1]),
        (8, 0, ["prefill", 4, 2, "prefill", 1]),
        (5, 0, ["prefill", 4, "prefill", 2, 1]),
    ],
)
def test_steps_of_every_width_share_a_prompt_while_it_has_room(max_len: int, start: int, steps: list[object]) -> None:
    plans: list[StepPlan] = []

    def launch(plan: StepPlan) -> SimpleNamespace:
        plans.append(plan)
        return SimpleNamespace(wait=lambda: SimpleNamespace(gpu_time=plan.width, gpu_gap=0.5, is_typical=True))

    sized = replace(geometry(8, 64, max_len), narrower=(1, 2))
    assert _steps(SimpleNamespace(launch=launch, is_self_drafting=False), sized, 3, queued=False) == [1.5, 2.5, 4.5]
    assert ["prefill" if plan.phase is Phase.PREFILL else plan.width for plan in plans] == steps
    assert plans[0].chunks[0].start == start
    assert plans[1].slots == [0, 1, 2]
    assert not any(not plan.drafts for plan in plans)
    plans.clear()
    self_drafting = SimpleNamespace(launch=launch, is_self_drafting=True)
    assert _steps(self_drafting, sized, 3, queued=False) == [1.5, 1.5, 2.5, 4.5]
    assert [plan.width for plan in plans if not plan.drafts] == [1], "the first of these"


class QueueingGpu:
    """A step takes 1 ms and a tenth for each row; the first that is launched to an idle device a second more."""

    is_self_drafting = False

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.queued = 0
        self.slots = SimpleNamespace(length=SimpleNamespace(is_cuda=True))

    def launch(self, plan: StepPlan) -> SimpleNamespace:
        late = 0.0 if self.queued else 1.0
        self.plans.append(plan)
        self.queued += 1
        result = SimpleNamespace(
            gpu_time=0.001 + 1e-4 * plan.width * len(parts_of(plan)), gpu_gap=late, is_typical=True
        )
        return SimpleNamespace(wait=lambda: (setattr(self, "queued", self.queued - 1), result)[1])

    def count(self, size: int, width: int) -> int:
        """Decode steps of so many requests."""
        decodes = [plan for plan in self.plans if plan.phase is Phase.DECODE]
        return sum((len(parts_of(plan)), plan.width) == (size, width) for plan in decodes)


def test_queued_steps_of_all_widths_share_a_prompt_and_the_first_of_each_does_not_count() -> None:
    gpu, sized = QueueingGpu(), replace(geometry(256, 64, 4096), narrower=(1, 2, 4), width=8)
    assert _steps(gpu, sized, 4, queued=True) == pytest.approx([0.0014, 0.0018, 0.0026, 0.0042])
    assert [plan.phase for plan in gpu.plans].count(Phase.PREFILL) == 1
    assert [gpu.count(4, width) for width in (8, 4, 2, 1)] == [4] * 4
    assert [plan.width for plan in gpu.plans] == sorted((plan.width for plan in gpu.plans), reverse=True)


@pytest.mark.parametrize(
    ("size", "width", "count"), [(1, 1, 3), (128, 1, 3), (64, 4, 3), (256, 2, 2), (256, 8, 2), (1000, 1, 2)]
)
def test_few_steps_of_many_rows_are_queued(size: int, width: int, count: int) -> None:
    assert queued_steps(size, width) == count


@pytest.mark.parametrize("max_len", [9, 40, 100, 4096])
def test_queued_steps_never_pass_the_end_of_a_request(max_len: int) -> None:
    gpu, sized = QueueingGpu(), replace(geometry(8, 64, max_len), narrower=(1,))
    _steps(gpu, sized, 2, queued=True)
    assert gpu.plans[0].phase is Phase.PREFILL
    positions = 0
    for plan in gpu.plans:
        positions = parts_of(plan)[0].start + 1 if plan.phase is Phase.PREFILL else positions + plan.width
        assert positions < max_len


def test_a_start_on_a_gpu_launches_few_prompts_and_few_large_steps() -> None:
    """256 slots and four widths took 8 s: most of it in prompts that were alike, and in steps of 50 ms."""
    gpu, sized = QueueingGpu(), replace(geometry(256, 8192, 4096), narrower=(1, 2, 4), width=8)
    costs = measure_steps(gpu, sized, (1, 256))
    assert costs.batch_sizes == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert [plan.phase for plan in gpu.plans].count(Phase.PREFILL) == 2 * len(costs.batch_sizes)
    assert (gpu.count(1, 8), gpu.count(256, 8)) == (8, 6)
    assert costs.seconds[-1] == pytest.approx([0.0266, 0.0522, 0.1034, 0.2058])


def test_three_steps_are_timed_again() -> None:
    gpu, sized = QueueingGpu(), replace(geometry(256, 8192, 4096), narrower=(1, 2, 4), width=8)
    kept = measure_steps(gpu, sized, (1, 256))
    gpu.plans.clear()
    found = list(again(gpu, sized, kept))
    assert [(size, width) for size, width, _ in found] == [(1, 1), (16, 2), (256, 8)]
    assert [ratio for *_, ratio in found] == pytest.approx([1.0, 1.0, 1.0])
    slower = StepCosts((4,), (1, 8), ((0.0007, 0.0042),))
    assert [ratio for *_, ratio in again(gpu, sized, slower)] == pytest.approx([2.0, 1.0])


def test_steps_that_cannot_pay_are_not_timed_and_take_too_long() -> None:
    sized = replace(geometry(256, 8192, 4096), narrower=(1, 2, 4), width=8, largest=(256, 256, 128, 64))
    gpu = QueueingGpu()
    kept = measure_steps(gpu, sized, (1, 64, 256))
    offered = {
        size: sum(taken < NEVER_S for taken in row) for size, row in zip(kept.batch_sizes, kept.seconds, strict=True)
    }
    assert (offered[64], offered[128], offered[256]) == (4, 3, 2) and set(map(len, kept.seconds)) == {4}
    assert gpu.count(128, 8) == gpu.count(256, 4) == 0 < gpu.count(128, 4)
    assert [(size, width) for size, width, _ in again(gpu, sized, kept)] == [(1, 1), (16, 2), (256, 2)]


@pytest.mark.parametrize(
    ("seconds", "taken"), [([1.0, 1.05, 0.1], 2), ([2.0, 1.0, 1.5], 3), ([1.0, 1.5, 1.05, 0.1], 3)]
)
def test_a_time_is_taken_until_two_agree(seconds: list[float], taken: int) -> None:
    left = iter(seconds)
    assert _agreed(lambda: next(left)) == min(seconds[:taken])
    assert list(left) == seconds[taken:]


@pytest.mark.parametrize(("max_len", "far"), [(8192, PROBE_CONTEXT), (1000, 935)])
def test_attention_is_timed_behind_no_more_context_than_it_needs(
    max_len: int, far: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []

    def seconds(executor: object, plan: StepPlan) -> float:
        starts.append(parts_of(plan)[0].start)
        first, end = parts_of(plan)[0].rows_out
        return 0.1 + 0.001 * parts_of(plan)[0].start + 0.002 * (end - first)

    monkeypatch.setattr(step_times, "_timed", seconds)
    found = measure_chunk(SimpleNamespace(slots=OUT), geometry(8, 4096, max_len))
    assert starts == [0, 0, far, 0, 0]
    assert (found.tokens, found.pairs) == (320, pytest.approx(0.5 / 0.001 * 64, abs=1))
    assert found.costs.token_s == pytest.approx(0.1 / 64) and found.costs.pair_s == pytest.approx(0.001 / 64)
    assert found.costs.out_s == pytest.approx(0.002, rel=0.02)


@pytest.mark.parametrize("max_len", [131072, 4096, 600])
@pytest.mark.parametrize("costs", [PrefillCosts(0.002, 2e-5, 1e-9, out_s=1e-5), PrefillCosts(0.0, 1e-6, 0.0)])
def test_the_costs_of_prompts_are_those_of_the_device(max_len: int, costs: PrefillCosts) -> None:
    """A constant is found where two lengths fit."""

    def launch(plan: StepPlan) -> SimpleNamespace:
        (work,) = parts_of(plan)
        num_tokens = len(work.tokens) // 4
        pairs = num_tokens * (work.start + num_tokens / 2)
        seconds = costs.step_s + num_tokens * costs.token_s + pairs * costs.pair_s
        seconds += (work.rows_out[1] - work.rows_out[0]) * costs.out_s
        return SimpleNamespace(wait=lambda: SimpleNamespace(gpu_time=seconds - 1e-4, gpu_gap=1e-4, is_typical=True))

    sized = geometry(8, 8192, max_len)
    found = measure_prefill(SimpleNamespace(launch=launch, slots=OUT), sized, (16, 512))
    assert found.padded_rows == (16, 512)
    assert found.out_s == pytest.approx(costs.out_s, rel=0.01)
    longest = min(8192, max_len - 1)
    for start, num_tokens in ((0, longest), (0, longest // 2), (max_len - 1 - longest // 4, longest // 4)):
        pairs = num_tokens * (start + num_tokens / 2)
        seconds = costs.step_s + num_tokens * costs.token_s + pairs * costs.pair_s
        expected = found.step_s + num_tokens * found.token_s + pairs * found.pair_s
        loose = max_len == 600  # a chunk is as long as the context
        assert expected == pytest.approx(seconds, rel=0.7 if loose else 0.01), (start, num_tokens)

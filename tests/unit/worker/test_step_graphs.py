"""Captures of a step's parts: how many graphs there are of each, and that replays give the tokens of launched steps."""

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs
from support.graph_runners import runner_of
from support.plans import plan_of
from support.prompt_plans import SAMPLINGS, fresh, prompt, run
from support.replayed_parts import ReplayedParts, remembering_no_rows
from support.ring import RingConfig, tiny_loaded

from overlap_spec.messages import StepPlan
from overlap_spec.sampling.context import COMMON_WORK, SAMPLING_WORK, SamplingWork
from overlap_spec.speculative.interfaces import Guesses, SlotBatch
from overlap_spec.worker import capture, graphs as graphs_module
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.graphs import Reach
from overlap_spec.worker.step import StepShape, captured_shapes

SIZES = (1, 4)
WIDTHS = (1, 2, 4)
KINDS = len(SAMPLING_WORK)
DRAFTS = len({(kind.sampled, kind.filtered, kind.processed) for kind in SAMPLING_WORK})  # log-probs draft as others do
SHAPES = captured_shapes(64, 0, 10)  # of prefill steps: 16, 32 and 64 rows


def executor_of(method: str, topk: int = 1) -> Executor:
    num_steps, method = (0, "EAGLE3") if method == "NONE" else (3, method)
    models = tiny_loaded(1, num_steps, method=method, topk=topk)
    config = RingConfig(
        method=method,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_steps + 1,
        num_slots=10,
        num_pages=401,
        widths_seed=1 if num_steps else None,  # so that steps of width 1 leave rows to catch up with
    )
    return build_executor(models, config.geometry(), torch.device("cpu"))


@dataclass
class Captured:
    """How many graphs decode and prefill steps have, by part."""

    decode: Counter[str]
    prefill: Counter[str]


def captured(executor: Executor) -> Captured:
    """Let an executor replay."""
    widths = tuple(width for width in WIDTHS if width <= executor.slots.width)
    windows, prompts, both = ReplayedParts(), ReplayedParts(), ReplayedParts()
    runner_of(executor, SIZES, widths).capture(windows)
    runner_of(executor, (), widths, SHAPES).capture(prompts)
    runner = runner_of(executor, SIZES, widths, SHAPES)
    runner.capture(both)
    executor.use(runner)
    assert both.counts == windows.counts + prompts.counts
    return Captured(windows.counts, prompts.counts)


@pytest.mark.slow
def test_layers_are_captured_once_and_the_rest_by_kind_of_sampling() -> None:
    graphs = captured(executor_of("EAGLE3"))
    assert graphs.decode == {"layers": 6, "judge": 6 * KINDS, "draft": 4 * DRAFTS, "catch up": 2}, "none at width 1"
    narrower = 1 + len(COMMON_WORK)  # one that proposes nothing, and those that propose one guess
    assert graphs.prefill == {"layers": 3, "judge": 3 * KINDS, "draft": 3 * (DRAFTS + narrower)}


@pytest.mark.slow
def test_a_draft_that_draws_nothing_is_captured_once() -> None:
    graphs = captured(executor_of("NGRAM"))
    assert graphs.decode == {"layers": 6, "judge": 6 * KINDS, "draft": 6}
    assert graphs.prefill == {"layers": 3, "judge": 3 * KINDS, "draft": 3}


def test_plain_decoding_has_no_draft() -> None:
    graphs = captured(executor_of("NONE"))
    assert graphs.decode == {"layers": 2, "judge": 2 * KINDS}
    assert graphs.prefill == {"layers": 3, "judge": 3 * KINDS}


@dataclass(frozen=True)
class Penalised(SamplingWork):
    """A kind of sampling that a draft does not tell from another."""

    penalised: bool = False


@pytest.mark.slow
def test_a_new_kind_of_sampling_captures_its_judge_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = captured(executor_of("EAGLE3"))
    kinds = (*SAMPLING_WORK, Penalised(True, False, False, penalised=True))
    monkeypatch.setattr(capture, "SAMPLING_WORK", kinds)
    after = captured(executor_of("EAGLE3"))
    assert after.decode - before.decode == {"judge": 6}


@pytest.mark.full_but_every(16)
@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize(
    ("method", "topk"), [("NONE", 1), ("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1), ("STANDALONE", 3), ("NGRAM", 1)]
)
def test_a_replay_is_the_launched_step(method: str, topk: int) -> None:
    """Kinds of sampling take turns, on the same graphs of layers."""
    launched, replayed = executor_of(method, topk), executor_of(method, topk)
    captured(replayed)
    for sampling in (*SAMPLINGS.values(), *SAMPLINGS.values()):
        expected = run(launched, sampling)
        assert run(replayed, sampling) == expected
        assert [len(row) for row in expected[0]] == [1, 1, 1, 0]


def noted_guesses(executor: Executor) -> list[tuple[int, list[int]]]:
    """A list that gets every guess from now on, with its slot; graphs have more slots than those of requests."""
    found: list[tuple[int, list[int]]] = []
    place = executor.slots.set_guesses

    def noting(batch: SlotBatch, guesses: Guesses) -> None:
        of_slots = zip(batch.slots.tolist(), guesses.tokens.T.tolist(), strict=True)
        found.extend((slot, tokens) for slot, tokens in of_slots if slot != executor.slots.dummy)
        place(batch, guesses)

    executor.slots.set_guesses = noting  # type: ignore[method-assign]
    return found


@pytest.mark.full_but_every(5)
@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("method", [("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1)], ids=str)
@pytest.mark.parametrize("first_width", [2, 1])
def test_prompts_that_propose_narrow_windows_are_replayed_as_they_are_launched(
    method: tuple[str, int], first_width: int
) -> None:
    launched, replayed = executor_of(*method), executor_of(*method)
    captured(replayed)
    guesses = [noted_guesses(executor) for executor in (launched, replayed)]
    with remembering_no_rows():
        for sampling in (*SAMPLINGS.values(), structs.replace(SAMPLINGS["sampled"], min_new_tokens=0)):
            assert run(replayed, sampling, first_width) == run(launched, sampling, first_width)
    assert guesses[0] and guesses[1] == guesses[0]


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("method", ["EAGLE3", "STANDALONE"])
def test_no_draft_is_launched_after_prompts_of_a_small_model(method: str) -> None:
    """Whatever width its policy asks for, and where nothing is proposed in rare kinds of sampling too."""
    executor, launched = executor_of(method), list[int]()
    captured(executor)
    prompts = [held.parts[0] for shape, held in executor.runner._captured.items() if shape.prompts]

    def draft(rows: object, work: SamplingWork, width: int) -> None:
        launched.append(width)

    for part in prompts:
        part.kind = SimpleNamespace(proposed=part.kind.proposed, draft=draft)
    with remembering_no_rows():
        for width in WIDTHS:
            run(executor, SAMPLINGS["greedy"], width)
        run(executor, SAMPLINGS["sampled"], 1)
    assert len(prompts) == len(SHAPES) and launched == []


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("STANDALONE", 1)])
def test_a_request_that_outgrows_short_page_tables_goes_on(
    method: str, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it begins with graphs of short page tables; with as many pages as the whole table it leaves them."""
    monkeypatch.setattr(graphs_module, "SHORT_CONTEXT", 64)
    launched, replayed = executor_of(method, topk), executor_of(method, topk)
    graphs = captured(replayed)
    assert graphs.decode["layers"] == 12
    seen: list[int] = []
    gather = Reach.columns_for
    monkeypatch.setattr(Reach, "columns_for", lambda *args: seen.append(gather(*args)) or seen[-1])
    width = launched.slots.width
    begin = fresh(0, prompt(0, 20), SAMPLINGS["greedy"])
    pages, given = begin.new_pages, -(-20 // launched.decode_step.page_size)
    plans = [plan_of(1, [replace(begin, new_pages=pages[:given])], width)]
    for step, page in enumerate(pages[given:]):  # a page a step, or more than it needs
        plans.append(StepPlan(2 + step, width, [0], {0: [page]}))
    tokens = [[executor.launch(plan).wait().tokens for plan in plans] for executor in (launched, replayed)]
    assert tokens[0] == tokens[1]
    short, whole = min(seen), replayed.slots.num_pages
    assert short < whole and seen == sorted(seen) and set(seen) == {short, whole}


@pytest.mark.slow
def test_of_trees_only_narrow_windows_have_graphs_for_short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "SHORT_CONTEXT", 64)
    monkeypatch.setattr(graphs_module, "SHORT_TREE", 2)
    assert captured(executor_of("EAGLE3", 3)).decode["layers"] == len(SIZES) * (len(WIDTHS) + 2)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 3), ("STANDALONE", 1)])
def test_rare_kinds_of_sampling_are_launched_after_prompts_of_a_large_model(method: str, topk: int) -> None:
    launched, replayed, recorder = executor_of(method, topk), executor_of(method, topk), ReplayedParts()
    runner = runner_of(replayed, (1, 6), WIDTHS, SHAPES, hides_rare=True)
    runner.capture(recorder)
    common = len(COMMON_WORK)  # each has a draft of its own
    assert recorder.counts["judge"] == 2 * 3 * KINDS + 3 * common
    assert recorder.counts["draft"] == 2 * 2 * DRAFTS + 3 * common
    replayed.use(runner)
    for sampling in SAMPLINGS.values():
        with remembering_no_rows():  # drafts are launched on rows of replays
            assert run(replayed, sampling) == run(launched, sampling)


def test_slots_are_written_into_a_graph_once() -> None:
    """A step of the same slots brings the same tensor, so its graph has them already."""
    executor = executor_of("NONE")
    runner = runner_of(executor, SIZES)
    runner.capture(ReplayedParts())
    shape = runner.shape_for(StepShape(3, 1, executor.slots.num_pages), lambda: 1)
    held = runner._captured[shape].inputs[0]
    slots = torch.tensor([2, 0, 5])
    with torch.inference_mode():
        runner.forward(shape, slots)
        assert held.tolist() == [2, 0, 5, executor.slots.dummy], "the rest is padding"
        held.fill_(1)
        runner.forward(shape, slots)
        assert held.tolist() == [1] * 4, "not written again"
        runner.forward(shape, torch.tensor([7, 8]))
        assert held.tolist() == [7, 8, *[executor.slots.dummy] * 2]

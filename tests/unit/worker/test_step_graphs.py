"""Captures of a step's parts: how many graphs there are of each, and that replays give the tokens of launched steps."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from support.plans import plan_of
from support.prompt_plans import SAMPLINGS, fresh, prompt, run
from support.replayed_parts import ReplayedParts, remembering_no_rows
from support.ring import RingConfig, tiny_loaded

from overlap_spec.messages import StepPlan
from overlap_spec.sampling.types import SAMPLING_WORK, SamplingWork
from overlap_spec.worker import decode_graphs, step_graphs
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.decode_graphs import GraphDecoder, Reach
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.prefill_graphs import GraphPrefiller, captured_shapes

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
    widths = [width for width in WIDTHS if width <= executor.slots.width]
    decoder = GraphDecoder(executor.decode_step, executor.slots, widths, SIZES)
    prefiller = GraphPrefiller(executor.prefill_step, executor.slots, SHAPES)
    recorders = ReplayedParts(), ReplayedParts()
    decoder.capture(recorders[0])
    prefiller.capture(recorders[1])
    executor.use(decoder, prefiller)
    return Captured(recorders[0].counts, recorders[1].counts)


def test_layers_are_captured_once_and_the_rest_by_kind_of_sampling() -> None:
    graphs = captured(executor_of("EAGLE3"))
    assert graphs.decode == {"layers": 6, "judge": 6 * KINDS, "draft": 4 * DRAFTS, "catch up": 2}, "none at width 1"
    assert graphs.prefill == {"layers": 3, "judge": 3 * KINDS, "draft": 3 * DRAFTS}


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


def test_a_new_kind_of_sampling_captures_its_judge_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = captured(executor_of("EAGLE3"))
    kinds = (*SAMPLING_WORK, Penalised(True, False, False, penalised=True))
    monkeypatch.setattr(step_graphs, "SAMPLING_WORK", kinds)
    after = captured(executor_of("EAGLE3"))
    assert after.decode - before.decode == {"judge": 6}


@pytest.mark.slow_but_every(3)
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


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("method", [("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1)], ids=str)
@pytest.mark.parametrize("first_width", [1, 2])
def test_prompts_that_propose_narrow_windows_are_replayed_as_they_are_launched(
    method: tuple[str, int], first_width: int
) -> None:
    """Their drafts are captured for whole windows alone."""
    launched, replayed = executor_of(*method), executor_of(*method)
    captured(replayed)
    with remembering_no_rows():
        for sampling in SAMPLINGS.values():
            assert run(replayed, sampling, first_width) == run(launched, sampling, first_width)


def test_a_page_table_reaches_as_far_as_a_step_can_read() -> None:
    """Windows of four columns: eight positions behind the last page, which are one page of 16, two of 4."""
    reach = Reach(num_pages=1000, width=4, page_size=16)
    assert reach.columns(1) == reach.columns(8) == [1000, 128] and reach.columns(9) == reach.columns(0) == [1000]
    assert [reach.columns_for(1, lambda pages=pages: pages) for pages in (1, 127, 128, 1000)] == [128, 128, 1000, 1000]
    assert [Reach(1000, 4, 4).columns_for(1, lambda pages=pages: pages) for pages in (510, 511)] == [512, 1000]
    assert Reach(100, 4, 16).columns(1) == [100]


def test_pages_are_not_counted_where_all_steps_have_one_graph() -> None:
    def count() -> int:
        raise AssertionError

    assert Reach(1000, 4, 16).columns_for(9, count) == 1000
    assert Reach(100, 4, 16).columns_for(1, count) == 100


@pytest.mark.slow
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("STANDALONE", 1)])
def test_a_request_that_outgrows_short_page_tables_goes_on(
    method: str, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it begins with graphs of short page tables; with as many pages as the whole table it leaves them."""
    monkeypatch.setattr(decode_graphs, "SHORT_CONTEXT", 64)
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


def test_trees_have_no_graphs_for_short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "SHORT_CONTEXT", 64)
    assert captured(executor_of("EAGLE3", 3)).decode["layers"] == 6

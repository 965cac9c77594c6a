"""Mixed steps, captured: the tokens of steps whose parts run one after the other, whatever they are padded to."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.graph_runners import CountingRunner, counted, runner_of
from support.prompt_plans import SAMPLINGS, run_mixed
from support.replayed_parts import ReplayedParts, fresh
from support.ring import RingConfig, tiny_loaded
from support.tiny.methods import MULTI_LAYER

from overlap_spec.messages import SamplingParams, TwoPartSizes
from overlap_spec.models.layers.attention import Forwards
from overlap_spec.speculative.proposers.autoregressive import AutoregressiveProposer, DeferredRows
from overlap_spec.speculative.proposers.tree import TreeProposer
from overlap_spec.worker import step
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.prefill import PrefillStep
from overlap_spec.worker.step import CHUNKS

EIGHT_B = 14 * 10**9  # FLOP of a row


def executor_of(method: str, topk: int = 1, **changes: Any) -> Executor:
    num_steps, method = (0, "EAGLE3") if method == "NONE" else (3, method)
    models = tiny_loaded(1, num_steps, method=method, topk=topk)
    config = RingConfig(method=method, num_steps=num_steps, topk=topk, num_slots=10, num_pages=401, **changes)
    return build_executor(models, config.geometry(), torch.device("cpu"))


def replaying(
    executor: Executor, batches: tuple[int, ...], rows: tuple[tuple[int, ...], ...], width: int | None = None
) -> tuple[Counter[str], CountingRunner]:
    """Let an executor replay these sizes, and no others. `width`: of the decode steps; None: the window's.

    Returns what was captured, and a count of what is run.
    """
    recorder, sizes = ReplayedParts(), TwoPartSizes(width or executor.slots.width, CHUNKS, batches, rows)
    runner = runner_of(executor, beside=sizes)
    runner.capture(recorder)
    executor.use(runner)
    return recorder.counts, counted(executor)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(8)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("NONE", 1), (MULTI_LAYER[0], 1)])
def test_a_replay_is_two_steps(
    method: str, topk: int, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds on the same graphs. One step has more rows than any size."""
    monkeypatch.setattr(Forwards, "of", fresh)  # drafts run on rows that a replay has written anew
    monkeypatch.setattr(step, "READS_ALL", 20)  # so the larger size reads last rows alone
    apart, captured = executor_of(method, topk), executor_of(method, topk)
    _, alone = replaying(apart, (), ())
    expected = run_mixed(apart, sampling)
    assert alone.num_together == 0
    counts, both = replaying(captured, (2, 10), ((16,), (24,)))
    assert counts == {"layers together": 2}
    for _ in range(2):
        assert run_mixed(captured, sampling) == expected
    assert both.num_together == 2 * 3, "a step of 32 tokens is not captured"


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("topk", [1, 3])
def test_windows_of_one_column_run_with_prompts_and_defer_what_their_draft_reads(
    topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forwards, "of", fresh)
    apart, captured = executor_of("EAGLE3", topk, widths_seed=1), executor_of("EAGLE3", topk, widths_seed=1)
    _, alone = replaying(apart, (), ())
    _, both = replaying(captured, (2, 10), ((16,), (24,)), width=1)
    for sampling in SAMPLINGS.values():
        assert run_mixed(captured, sampling, width=1) == run_mixed(apart, sampling, width=1)
        kept = [deferred_rows(executor) for executor in (captured, apart)]
        assert kept[0].tokens[:-1].any() and kept[0].tokens[:-1].equal(kept[1].tokens[:-1]), "all but padding's"
        assert torch.allclose(kept[0].aux_hidden[:-1], kept[1].aux_hidden[:-1])
    assert both.num_together == 2 * 3 and alone.num_together == 0


def deferred_rows(executor: Executor) -> DeferredRows:
    proposer = executor.decode_step.method.proposer
    drafter = proposer._drafter if isinstance(proposer, TreeProposer) else proposer
    assert isinstance(drafter, AutoregressiveProposer)
    return drafter._deferred


def test_launched_one_operation_after_the_other_all_sizes_run_together() -> None:
    apart, eager = executor_of("EAGLE3"), executor_of("EAGLE3")
    _, alone = replaying(apart, (), ())
    both = counted(eager)
    assert run_mixed(eager, SAMPLINGS["greedy"]) == run_mixed(apart, SAMPLINGS["greedy"])
    assert (both.num_together, alone.num_together) == (4, 0)


def test_prompts_that_go_on_draw_and_propose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the four steps end a prompt, as one before them does."""
    executor, calls = executor_of("EAGLE3"), Counter[str]()
    for name in ("decide", "draft", "draw_nothing", "absorb"):
        whole = getattr(PrefillStep, name)
        monkeypatch.setattr(PrefillStep, name, lambda *given, n=name, w=whole: (calls.update([n]), w(*given))[1])
    run_mixed(executor, SAMPLINGS["greedy"])
    assert calls == {"decide": 4, "draft": 4, "draw_nothing": 1, "absorb": 5}, "a draft absorbs, too"

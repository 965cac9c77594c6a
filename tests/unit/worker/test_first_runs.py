"""What finds kernels launches everything that captures launch, though layers and kinds are left out of it.

Before captures hardly any of it is run.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlap_spec_kernels import NotMadeError
from support.graph_runners import runner_of
from support.operations import operations
from support.prompt_plans import SAMPLINGS, run
from support.replayed_parts import ReplayedParts
from support.ring import RingConfig, tiny_loaded

from overlap_spec.config import AcceptSettings
from overlap_spec.messages import TwoPartSizes
from overlap_spec.models.layers.layer_run import skips_layers
from overlap_spec.sampling.context import SAMPLING_WORK
from overlap_spec.worker import capture as captures
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.capture import FIRST_RUNS, FirstRuns, run_once
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.graphs import GraphRunner
from overlap_spec.worker.step import CHUNKS, PromptShape

SHAPES = [PromptShape(16, CHUNKS + 1, 16), PromptShape(24, CHUNKS + 1, 24)]
WIDTHS = (1, 2, 4)
MATCH = AcceptSettings()
KINDS = len(SAMPLING_WORK)


def deep(method: str = "EAGLE3", topk: int = 1, layers: int = 7, accept: AcceptSettings = MATCH) -> Executor:
    """Its target has layers to leave out."""
    config = RingConfig(method, num_steps=3, topk=topk, num_slots=10, num_pages=401, widths_seed=1)
    models = tiny_loaded(1, 3, method=method, topk=topk, layers=layers)
    return build_executor(models, config.geometry(), torch.device("cpu"), accept)


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1), ("NGRAM", 1)])
def test_prompts_launch_no_more_in_all_kinds_and_layers(method: str, topk: int) -> None:
    executor = deep(method, topk)
    runner = runner_of(executor, prompts=SHAPES)
    assert operations(lambda: run_every_kind(runner)) == operations(runner.run_once)


def run_every_kind(runner: GraphRunner) -> None:
    """All that steps of its shapes launch, in every kind of sampling and all layers; catching up left out."""
    with torch.inference_mode():
        for shape in runner._sizes.shapes():
            if shape.width:
                run_once(runner._parts(shape, runner._dummies(shape)))


def test_kinds_of_sampling_are_run_once_for_each_number_of_chunks() -> None:
    executor, shapes = deep(), [*SHAPES, PromptShape(24, 11, 24)]
    first = [(shape.prompts, runs) for shape, runs in runner_of(executor, prompts=shapes)._first_runs()]
    runs = [(prompts.rows, prompts.chunks, len(runs.judge), len(runs.draft)) for prompts, runs in first]
    assert runs == [(24, 11, KINDS, KINDS), (24, 9, KINDS, KINDS), (16, 9, 1, 0)]


def test_prompts_of_every_kind_are_run_where_decode_steps_are_not(runs: list[tuple[int, int, bool]]) -> None:
    """Longer prompts are in no graph, and must find memory."""
    executor = deep()
    runner_of(executor, prompts=SHAPES).capture(ReplayedParts())
    assert runs == [(KINDS, KINDS, False)]


@pytest.mark.full_but_every(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "topk", "accept"),
    [
        ("EAGLE3", 3, MATCH),
        ("EAGLE3", 1, MATCH),
        ("EAGLE3", 1, AcceptSettings(rejection=True)),
        ("STANDALONE", 3, MATCH),
        ("NGRAM", 1, MATCH),
    ],
)
def test_narrower_steps_launch_no_more_in_all_kinds(method: str, topk: int, accept: AcceptSettings) -> None:
    """Layers apart: only drawing differs between kinds."""
    executor = deep(method, topk, layers=2, accept=accept)
    runner = runner_of(executor, (4,), (1, 2, 3, executor.slots.width))
    assert not operations(lambda: run_every_kind(runner)) - operations(runner.run_once)


def test_of_sizes_between_powers_of_two_two_kinds_are_found() -> None:
    runner = runner_of(deep(), (3, 4, 5, 6), (2, 4))
    found = [
        (shape.slots, shape.width, len(runs.judge), len(runs.draft))
        for shape, runs in runner._first_runs()
        if shape.width and runs is not None
    ]
    whole, some = [(4, KINDS, KINDS), (2, KINDS, 2)], [(4, 2, 2), (2, 2, 1)]
    assert found == [(size, *of) for size in (6, 5, 4, 3) for of in (whole if size in (4, 6) else some)]


class RefusedParts(ReplayedParts):
    """Some captures come to what is not made yet. `refused`: how often each part still does.

    `since`: of which steps on, by number.
    """

    def __init__(self, since: int = 1, **refused: int) -> None:
        super().__init__()
        self.since, self.refused = since, refused

    def record(self, part: str, work: Callable[[], Any]) -> Any:
        step = self.counts["layers"] + (part == "layers")
        if self.refused.get(part) and step >= self.since:
            self.refused[part] -= 1
            raise NotMadeError(part)
        return super().record(part, work)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """What was run before captures: how many kinds of judge and draft, and whether all layers."""
    noted: list[tuple[int, int, bool]] = []
    run = captures.run_once

    def run_once(parts: Any, runs: FirstRuns) -> None:
        noted.append((len(runs.judge), len(runs.draft), not skips_layers()))
        run(parts, runs)

    monkeypatch.setattr(captures, "run_once", run_once)
    return noted


def capture(executor: Executor, recorder: ReplayedParts) -> GraphRunner:
    runner = runner_of(executor, (4,), WIDTHS)
    runner.capture(recorder)
    return runner


def test_windows_alone_are_captured_without_a_run(runs: list[tuple[int, int, bool]]) -> None:
    executor, recorder = deep(), ReplayedParts()
    runner_of(executor, (2, 4), WIDTHS).capture(recorder)
    assert not runs and recorder.counts["layers"] == 6


@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("since", [1, 2])
@pytest.mark.parametrize(("part", "kinds"), [("layers", 0), ("judge", 1), ("draft", 1)])
def test_what_a_capture_may_not_make_is_made_by_a_run(
    part: str, kinds: int, since: int, runs: list[tuple[int, int, bool]]
) -> None:
    launched, replayed, recorder = deep(), deep(), RefusedParts(since, **{part: 1})
    replayed.use(capture(replayed, recorder))
    drafts = recorder.counts["draft"]
    assert drafts % 2 == 0 and recorder.counts == {"layers": 3, "judge": 3 * KINDS, "draft": drafts, "catch up": 1}
    assert runs == [(kinds, kinds, False)] and recorder.seconds[FIRST_RUNS] > 0
    assert run(replayed, SAMPLINGS["sampled"]) == run(launched, SAMPLINGS["sampled"])


def test_what_is_never_made_ends_the_start_and_is_named(runs: list[tuple[int, int, bool]]) -> None:
    with pytest.raises(NotMadeError, match="judge"):
        capture(deep(), RefusedParts(layers=1, judge=99))
    assert runs == [(0, 0, False), (1, 1, False)], "the layers, then the kind, have been run"


def test_what_follows_layers_of_both_is_run_once_if_decode_steps_of_the_batch_were(
    runs: list[tuple[int, int, bool]],
) -> None:
    executor = deep()
    sizes = TwoPartSizes(executor.slots.width, CHUNKS, (2, 4, 6), ((16, 24), (16,), (16,)))
    runner_of(executor, (4, 6), beside=sizes).capture(ReplayedParts())
    every, absorbed = (KINDS, KINDS, False), (1, 0, False)
    assert runs == [every, every, absorbed], "24 rows beside 2 slots; 16 beside 6 and 2, not beside 4"

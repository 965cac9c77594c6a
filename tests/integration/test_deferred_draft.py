"""Steps of width 1 leave draft rows behind; after catching up, the draft's KV is what a prefill would have written."""

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.graph_runners import runner_of
from support.plans import SlotPart, parts_of, plan_of, windows
from support.replayed_parts import ReplayedParts
from support.ring import RingConfig, tiny_loaded
from support.tiny.methods import MULTI_LAYER

from overlap_spec.messages import ResetSlot, SamplingParams, StepPlan
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import PagedAttention
from overlap_spec.speculative.interfaces import ABSORBED_ROWS, Proposer
from overlap_spec.speculative.proposers import autoregressive
from overlap_spec.speculative.proposers.autoregressive import AutoregressiveProposer
from overlap_spec.speculative.proposers.multi_layer import MultiLayerProposer
from overlap_spec.speculative.proposers.standalone import StandaloneProposer
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.geometry import Geometry

NUM_STEPS = 3
CONFIG = RingConfig(num_steps=NUM_STEPS, page_size=4, num_pages=120, num_slots=2, widths_seed=0)
PROMPTS = ([11, 23, 35, 47, 59], [20 + i for i in range(17)])
PAGES_PER_SLOT = 30
DEFERRED = 2 * ABSORBED_ROWS  # rows that a slot may leave behind


class Bench:
    """Two slots of an executor, driven plan by plan, with the planner's part played by hand."""

    def __init__(self, method: str, replays: bool = False) -> None:
        """`replays`: decode steps and catching up are captured."""
        self.method = method
        self.unknown = NUM_STEPS - 1 if method in MULTI_LAYER else 0  # rows that depend on tokens to come
        self.geometry: Geometry = replace(CONFIG.geometry(), most_deferred=DEFERRED)
        self.executor: Executor = build_executor(tiny_loaded(7, NUM_STEPS, method=method), self.geometry, CONFIG.place)
        self.deferred = [0, 0]
        self.tokens = [list(prompt) for prompt in PROMPTS]
        if replays:
            runner = runner_of(self.executor, (2,), tuple(range(1, self.geometry.width + 1)))
            runner.capture(ReplayedParts())
            self.executor.use(runner)

    def prefill(self, slot: int, tokens: list[int], width: int = 0) -> None:
        """`width`: that windows are proposed for; 1: none are, and a small model leaves the root's row behind."""
        self.deferred[slot] = int(width == 1 and self.method.startswith("STANDALONE"))
        reset = ResetSlot(SamplingParams(temperature=0.0, seed=0), len(tokens), (), len(tokens))
        pages = [1 + slot + 2 * i for i in range(PAGES_PER_SLOT)]
        chunk = array("i", tokens).tobytes()
        work = SlotPart(slot=slot, new_pages=pages, tokens=chunk, reset=reset)
        self._run(plan_of(0, [work], width or self.geometry.width))

    def decode(self, width: int, slots: tuple[int, ...] = (0, 1)) -> list[int]:
        """One step; returns the lengths of its runs."""
        catch_up = any(self.deferred[slot] >= (DEFERRED if width == 1 else 1) for slot in slots)
        runs = self._run(windows(0, slots, width), catch_up)
        for slot in slots:
            kept = 0 if catch_up else self.deferred[slot]
            self.deferred[slot] = kept + 1 if width == 1 else 0
        return runs

    def _run(self, plan: StepPlan, catches_up: bool = False) -> list[int]:
        result = self.executor.launch(plan).wait()
        tokens = result.tokens
        assert result.caught_up == catches_up
        for work, run in zip(parts_of(plan), tokens, strict=True):
            self.tokens[work.slot] += run
        return [len(run) for run in tokens]

    def draft_kv(self, slot: int, length: int) -> torch.Tensor:
        """K and V of the draft's rows 0..length-1. Shapes: -> [layers, 2, length, nkv, d]."""
        cache = draft_cache(self.executor.decode_step.method.proposer)
        positions = torch.arange(length)
        rows = self.executor.slots.page_table[slot, positions // 4].long() * 4 + positions % 4
        layers = [torch.stack([kv.flatten(0, 1)[rows] for kv in pair]) for pair in zip(cache.k, cache.v, strict=True)]
        return torch.stack(layers)

    def window(self, slot: int) -> list[int]:
        return self.executor.slots.window[slot].tolist()


def draft_cache(proposer: Proposer) -> KVCache:
    """The draft's own cache."""
    if isinstance(proposer, MultiLayerProposer):
        return proposer._layers._heads[0]._attention.cache  # of all layers
    if isinstance(proposer, StandaloneProposer):
        return proposer._model._model._run_layers._attention.cache  # of a tiny Llama
    assert isinstance(proposer, AutoregressiveProposer)
    head = proposer._head
    return getattr(head, "_run_layers", head)._attention.cache  # of the draft head


@pytest.fixture(params=[0, autoregressive.FEW_ROWS])
def few_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of windows a row each is read, or of small ones all."""
    monkeypatch.setattr(autoregressive, "FEW_ROWS", request.param)


@pytest.fixture(params=["EAGLE3", "EAGLE", "STANDALONE", "STANDALONE of fewer tokens", *MULTI_LAYER])
def bench(request: pytest.FixtureRequest, few_rows: None) -> Iterator[Bench]:
    bench = Bench(request.param)
    for slot, prompt in enumerate(PROMPTS):
        bench.prefill(slot, prompt)
    yield bench
    bench.executor.close()


def assert_complete(bench: Bench) -> None:
    """All draft rows but the last deferred ones are those of a prefill of the same tokens, and so are the guesses."""
    for slot in (0, 1):
        tokens = bench.tokens[slot]
        fresh = Bench(bench.method)
        fresh.prefill(slot, tokens[:-1])
        num_complete = len(tokens) - 1 - bench.deferred[slot] - bench.unknown
        torch.testing.assert_close(
            bench.draft_kv(slot, num_complete), fresh.draft_kv(slot, num_complete), rtol=1e-9, atol=1e-9
        )
        if bench.deferred[slot] == 0:
            proposed = [token for token in bench.window(slot) if token >= 0]  # less than that after a narrow step
            assert proposed == fresh.window(slot)[: len(proposed)]
        fresh.executor.close()


@pytest.mark.slow_but_every(3)
def test_narrow_steps_leave_no_guesses_behind(bench: Bench) -> None:
    assert all(token >= 0 for token in bench.window(0))
    bench.decode(3)
    assert [token >= 0 for token in bench.window(0)] == [True, True, True, False]
    assert bench.decode(1) == [1, 1]
    assert [token >= 0 for token in bench.window(0)] == [True, False, False, False]
    assert bench.decode(4) == [1, 1], "a wide step after a narrow one has no guesses to verify"
    assert all(token >= 0 for token in bench.window(0))


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(23)
@pytest.mark.parametrize("num_narrow", [1, ABSORBED_ROWS, ABSORBED_ROWS + 1, DEFERRED, DEFERRED + 1, 2 * DEFERRED + 3])
def test_after_catching_up_the_draft_knows_everything(bench: Bench, num_narrow: int) -> None:
    bench.decode(4)
    for _ in range(num_narrow):
        bench.decode(1)
    assert_complete(bench)  # but for what is deferred still
    bench.decode(4)
    assert bench.deferred == [0, 0]
    assert_complete(bench)


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("num_narrow", [0, 1, ABSORBED_ROWS])
def test_a_prompt_after_which_nothing_was_proposed_is_known_with_its_root(bench: Bench, num_narrow: int) -> None:
    """The draft of one slot lags a row further behind than that of the other, whose prompt has guesses."""
    bench = Bench(bench.method)
    for slot, prompt in enumerate(PROMPTS):
        bench.prefill(slot, prompt, width=1 if slot else 4)
    for _ in range(num_narrow):
        bench.decode(1)
    bench.decode(4)
    assert_complete(bench)
    bench.decode(4)
    assert_complete(bench)


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(17)
@pytest.mark.parametrize("widths", [(4,) * 6, (2, 4, 3, 4, 2, 2, 4), (3, 1, 2, 4, 1, 1, 4, 4, 2, 1, 3)])
def test_the_draft_knows_everything_after_steps_of_any_widths(bench: Bench, widths: tuple[int, ...]) -> None:
    """Whatever was accepted: a page that is handed to another request holds the right draft KV."""
    runs: list[int] = []
    for width in widths:
        runs += bench.decode(width)
        assert_complete(bench)
    assert len(set(runs)) > 1


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(9)
@pytest.mark.parametrize("replays", [False, True])
def test_slots_may_have_deferred_different_numbers_of_rows(bench: Bench, replays: bool) -> None:
    """Of one slot more than are absorbed at once, by graphs too: each takes from where the one before has ended.

    They are kept beyond the ring's end, and at its beginning.
    """
    if replays:
        bench = Bench(bench.method, replays=True)
        for slot, prompt in enumerate(PROMPTS):
            bench.prefill(slot, prompt)
    for _ in range(ABSORBED_ROWS):
        bench.decode(1)
    bench.decode(2)
    for slots in ((0,), (0,), (0, 1), (1,), *[(0,)] * ABSORBED_ROWS):
        bench.decode(1, slots)
    assert bench.deferred == [ABSORBED_ROWS + 3, 2]
    assert len(bench.tokens[0]) > DEFERRED + 1
    bench.decode(2)
    bench.decode(4)
    assert_complete(bench)


def test_catching_up_only_writes_what_is_read_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's K and V of all rows; what follows them, of no row, or of one of each slot."""
    if bench.method in MULTI_LAYER:
        pytest.skip("a draft of several layers reads all rows in each of them, so there is nothing to leave out")
    bench.decode(1)
    attended: list[int] = []
    attend = PagedAttention._attend

    def counted(self: PagedAttention, layer: Any, q: torch.Tensor, *more: Any) -> torch.Tensor:
        attended.append(len(q))
        return attend(self, layer, q, *more)

    monkeypatch.setattr(PagedAttention, "_attend", counted)
    decode_step = bench.executor.decode_step
    counts = torch.tensor([1, 0])
    decode_step.absorb_missed(torch.tensor([0, 1]), counts)
    assert counts.tolist() == [0, 0]
    assert attended[-1:] == ([len(PROMPTS)] if bench.method.startswith("STANDALONE") else [])


def test_a_head_attends_to_a_prompt_only_if_guesses_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before plain steps keys and values of its rows are enough."""
    bench, attended = Bench("EAGLE3"), list[KVCache]()
    attend = PagedAttention.__call__

    def counted(self: PagedAttention, *given: Any) -> torch.Tensor:
        attended.append(self.cache)
        return attend(self, *given)

    monkeypatch.setattr(PagedAttention, "__call__", counted)
    of_draft = draft_cache(bench.executor.decode_step.method.proposer)
    bench.prefill(0, PROMPTS[0], width=1)
    assert attended and not any(cache is of_draft for cache in attended)
    bench.prefill(1, PROMPTS[1], width=2)
    assert any(cache is of_draft for cache in attended)
    bench.executor.close()


@pytest.mark.slow_but_every(3)
def test_a_missing_row_would_be_noticed(bench: Bench) -> None:
    for _ in range(8):  # some methods' next draft makes up for the newest of them
        bench.decode(1)
    bench.executor._inputs._lag.forget((0, 1))
    bench.deferred = [0, 0]
    bench.decode(4)
    with pytest.raises(AssertionError, match="not close"):
        assert_complete(bench)

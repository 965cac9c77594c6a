"""Drafting trees, driven step by step: a chain is the tree with topk 1, and the draft's KV is what a prefill writes.

Steps have any widths, 1 among them, which leaves rows to be caught up with.
"""

from array import array
from dataclasses import replace

import pytest
import torch
from support.plans import SlotPart, parts_of, plan_of, windows
from support.ring import RingConfig, tiny_loaded
from support.tiny.eagle import load_tiny_eagle, tiny_eagle
from support.tiny.methods import TINY_METHODS
from support.tiny.models import tiny_target

from overlap_spec.config import AttentionSettings
from overlap_spec.errors import ConfigError
from overlap_spec.messages import ResetSlot, SamplingParams, StepPlan
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.speculative.drafts import ChainDraft, SmallModelDraft, TreeDraft
from overlap_spec.speculative.proposers.standalone import StandaloneProposer
from overlap_spec.speculative.proposers.tree import Branching, TreeProposer
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.startup.geometry import LoadedModels
from overlap_spec.worker.step import StepShape

NUM_STEPS, PAGE_SIZE, PAGES_PER_SLOT = 3, 4, 30
CONFIG = RingConfig(
    num_steps=NUM_STEPS, page_size=PAGE_SIZE, num_pages=2 * PAGES_PER_SLOT + 1, num_slots=2, widths_seed=0
)
MODELS_SEED = 20
PROMPTS = ([11, 23, 35, 47, 59], [20 + i for i in range(17)])
GREEDY = SamplingParams(temperature=0.0, seed=0)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.9, seed=5),
    "filtered": SamplingParams(temperature=1.2, top_k=6, top_p=0.9, min_p=0.02, min_new_tokens=12, seed=6),
}
DRAFTED = [name for name in TINY_METHODS if name.split()[0] in ("EAGLE", "EAGLE3", "STANDALONE")] + ["NEXTN"]


class Bench:
    """Two slots, driven plan by plan, with the planner's part played by hand."""

    def __init__(
        self,
        models: LoadedModels,
        width: int,
        sampling: SamplingParams = GREEDY,
        attention: AttentionSettings | None = None,
        simulated_accept_lens: tuple[float, ...] = (),
    ) -> None:
        self.models = models
        self.geometry = replace(CONFIG, num_draft_tokens=width).geometry()
        self.executor = build_executor(
            models, self.geometry, CONFIG.place, simulated_accept_lens=simulated_accept_lens, attention=attention
        )
        self.sampling = sampling
        self.tokens = [list(prompt) for prompt in PROMPTS]
        self.deferred = 0

    def prefill(self, slot: int, tokens: list[int], width: int = 0) -> None:
        """`width`: that trees are proposed for; 0: the widest."""
        reset = ResetSlot(self.sampling, len(PROMPTS[slot]), (7, 90), len(PROMPTS[slot]) + self.sampling.min_new_tokens)
        pages = [1 + slot + 2 * i for i in range(PAGES_PER_SLOT)]
        work = SlotPart(slot=slot, new_pages=pages, tokens=array("i", tokens).tobytes(), reset=reset)
        self._run(plan_of(0, [work], width or self.geometry.width))

    def decode(self, width: int) -> list[int]:
        """One step of both slots; returns the lengths of their runs."""
        runs = self._run(windows(0, (0, 1), width))
        self.deferred = 0 if width > 1 else self.deferred + 1
        return runs

    def trees(self) -> tuple[list[list[int]], list[list[int]]]:
        """Guesses of both slots, and their parents."""
        window, parents = self.executor.slots.window[:2], self.executor.slots.parents[:2]
        return window.tolist(), parents.where(window >= 0, 0).tolist()

    def draft_kv(self, slot: int, length: int) -> torch.Tensor:
        """K and V of the draft's rows 0..length-1. Shapes: -> [layers, 2, length, nkv, d]."""
        cache = draft_cache(self.executor.decode_step.method.proposer)
        places = torch.arange(length)
        rows = self.executor.slots.page_table[slot, places // PAGE_SIZE].long() * PAGE_SIZE + places % PAGE_SIZE
        layers = [torch.stack([kv.flatten(0, 1)[rows] for kv in pair]) for pair in zip(cache.k, cache.v, strict=True)]
        return torch.stack(layers)

    def _run(self, plan: StepPlan) -> list[int]:
        runs = self.executor.launch(plan).wait().tokens
        for work, run in zip(parts_of(plan), runs, strict=True):
            self.tokens[work.slot] += run
        return [len(run) for run in runs]


def draft_cache(proposer: object) -> KVCache:
    assert isinstance(proposer, TreeProposer)
    drafter = proposer._drafter
    if isinstance(drafter, StandaloneProposer):
        return drafter._model._model._run_layers._attention.cache
    head = drafter._head
    return getattr(head, "_run_layers", head)._attention.cache


def as_tree(models: LoadedModels, topk: int) -> LoadedModels:
    assert isinstance(models.proposer, ChainDraft | SmallModelDraft)
    return replace(models, proposer=TreeDraft(models.proposer, Branching(NUM_STEPS, topk)))


def started(
    models: LoadedModels,
    width: int,
    sampling: SamplingParams = GREEDY,
    attention: AttentionSettings | None = None,
) -> Bench:
    bench = Bench(models, width, sampling, attention)
    for slot, prompt in enumerate(PROMPTS):
        bench.prefill(slot, prompt)
    return bench


@pytest.mark.full_but_every(6)
@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", DRAFTED)
def test_a_chain_is_the_tree_with_one_child_a_node(method: str, sampling: str) -> None:
    """The same guesses and the same runs, so the same path."""
    assert_chain_is_tree(method, SAMPLINGS[sampling], AttentionSettings())


@pytest.mark.full_but_every(6)
@pytest.mark.slow
@pytest.mark.parametrize("draft_window", [1, 2, 6])
@pytest.mark.parametrize("method", DRAFTED)
def test_it_is_also_where_the_draft_sees_few_keys(method: str, draft_window: int) -> None:
    assert_chain_is_tree(method, GREEDY, AttentionSettings(draft_window=draft_window))


def assert_chain_is_tree(method: str, sampling: SamplingParams, attention: AttentionSettings) -> None:
    models = tiny_loaded(MODELS_SEED, NUM_STEPS, method=method)
    chain = started(models, NUM_STEPS + 1, sampling, attention)
    tree = started(as_tree(models, 1), NUM_STEPS + 1, sampling, attention)
    runs: list[int] = []
    for width in (4, 4, 4, 3, 1, 1, 4, 2, 4, 4, 4, 1, 4, 4):
        guesses, parents = tree.trees()
        assert chain.trees()[0] == guesses
        assert all(
            parents[slot][j] == j - 1 for slot in (0, 1) for j in range(1, NUM_STEPS + 1) if guesses[slot][j] >= 0
        )
        runs += tree.decode(width)
        assert chain.decode(width) == runs[-2:]
        assert chain.tokens == tree.tokens
    assert len(set(runs)) > 1


@pytest.mark.full_but_every(6)
@pytest.mark.slow_but_every(18)
@pytest.mark.parametrize("widths", [(8,) * 10, (4, 8, 1, 1, 8, 2, 3, 1, 8, 8), (1, 1, 1, 8, 8, 8, 4, 8, 8)])
@pytest.mark.parametrize("method", DRAFTED)
def test_the_draft_knows_all_that_is_committed(method: str, widths: tuple[int, ...]) -> None:
    """Its KV is that of a prefill of the same tokens, and so is the tree that it grows from there."""
    models = as_tree(tiny_loaded(MODELS_SEED, NUM_STEPS, method=method), 3)
    bench = Bench(models, 8)
    for slot, prompt in enumerate(PROMPTS):
        bench.prefill(slot, list(prompt), widths[0])
    runs: list[int] = []
    for width in widths:
        runs += bench.decode(width)
        for slot in (0, 1):
            tokens = bench.tokens[slot]
            fresh = Bench(models, 8)
            fresh.prefill(slot, tokens[:-1])
            length = len(tokens) - 1 - bench.deferred
            torch.testing.assert_close(bench.draft_kv(slot, length), fresh.draft_kv(slot, length), rtol=1e-9, atol=1e-9)
            if width == 8:
                assert [rows[slot] for rows in bench.trees()] == [rows[slot] for rows in fresh.trees()]
    assert len(set(runs)) > 1


def test_trees_leave_what_is_committed_alone() -> None:
    """Drafted rows are behind the pages: in the pages only a verdict writes."""
    models = as_tree(tiny_loaded(MODELS_SEED, NUM_STEPS), 3)
    bench = started(models, 8)
    cache = draft_cache(bench.executor.decode_step.method.proposer)
    num_pages = bench.geometry.num_pages
    assert cache.k[0].shape[0] == num_pages + -(-3 * 2 * 3 // PAGE_SIZE)  # three slots, the dummy's too, of two levels
    assert cache.k[0][num_pages:].any()
    written = [bench.draft_kv(slot, len(prompt) + 8) for slot, prompt in enumerate(PROMPTS)]
    for slot, prompt in enumerate(PROMPTS):
        assert not written[slot][:, :, len(prompt) + 1 :].any()


def test_more_children_than_the_draft_has_tokens_are_refused_by_name() -> None:
    models = tiny_loaded(MODELS_SEED, NUM_STEPS)
    few = load_tiny_eagle(tiny_eagle(1, tiny_target(MODELS_SEED)), models.target, torch.tensor([9, 4, 70]))
    small = replace(models, proposer=ChainDraft(few, NUM_STEPS))
    started(as_tree(small, 3), 8).decode(8)
    with pytest.raises(ConfigError, match="--speculative-eagle-topk: a draft of 3 tokens"):
        Bench(as_tree(small, 4), 8)


def test_what_filters_drop_is_no_guess() -> None:
    """Nothing is padded with tokens that nobody guessed: with top_k 2, a node has two children."""
    sampling = SamplingParams(temperature=1.0, top_k=2, seed=3)
    bench = started(as_tree(tiny_loaded(MODELS_SEED, NUM_STEPS), 4), 30, sampling)
    for _ in range(3):
        bench.decode(30)
        for guesses, parents in zip(*bench.trees(), strict=True):
            kept = [column for column in range(1, 30) if guesses[column] >= 0]
            assert kept == list(range(1, len(kept) + 1)), "first"
            children = [sum(parents[column] == parent for column in kept) for parent in range(len(kept) + 1)]
            assert max(children) == 2 and children[0] == 2
            assert len(kept) == 2 + 4 + 8, "two for each of the nodes that were run"


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", DRAFTED)
def test_padding_with_the_dummy_slot_changes_nothing(method: str, sampling: str) -> None:
    """As captured batches are padded: the dummy may be in them several times."""
    models = as_tree(tiny_loaded(MODELS_SEED, NUM_STEPS, method=method), 3)
    alone, padded = (started(models, 8, SAMPLINGS[sampling]) for _ in range(2))
    work = alone.executor.slots.sampling_work([0, 1])
    dummy = padded.executor.slots.dummy
    for width in (8, 8, 4, 8):
        alone.decode(width)
        with torch.inference_mode():
            shape = StepShape(4, width, padded.executor.slots.num_pages)
            (part,) = padded.executor.eager.forward(shape, torch.tensor([0, 1, dummy, dummy]))
            part.decide(work)
            part.draft(work, width)
        assert alone.trees() == padded.trees()
        assert torch.equal(alone.executor.slots.length, padded.executor.slots.length)


@pytest.mark.parametrize(("mean", "parents"), [(3.5, [0, 1, 2]), (1.3, [0, 0, 0])])
def test_trees_of_synthetic_acceptance_are_those_of_a_draft_that_guesses_so_well(
    mean: float, parents: list[int]
) -> None:
    """The first columns after the root, by which narrow windows are judged: a chain, or children of the root."""
    models = tiny_loaded(MODELS_SEED, NUM_STEPS, method="EAGLE3", topk=3)
    bench = Bench(models, 8, simulated_accept_lens=(mean,))
    for slot, prompt in enumerate(PROMPTS):
        bench.prefill(slot, list(prompt))
    for _ in range(3):
        assert [row[1:4] for row in bench.trees()[1]] == [parents] * 2
        bench.decode(8)

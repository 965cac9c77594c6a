"""The children of nodes: the likeliest tokens, the first a chain's guess; what is dropped is no guess."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import select_tree
from support.given_logits import GivenLogits
from support.reference.trees import marginal_nodes

from overlap_spec.models.interfaces import ComputedLogits, MarginalLogits, RowBatch
from overlap_spec.sampling.context import SAMPLING_WORK, DrawContext
from overlap_spec.sampling.sampler import draw_after
from overlap_spec.speculative.interfaces import SlotBatch, chain_context, level_context
from overlap_spec.speculative.proposers.block import BlockGuesser
from overlap_spec.speculative.proposers.tree import Branching, Marginals, TreeProposer, top_children

IDS = torch.randperm(200, generator=torch.Generator().manual_seed(2))[:64]
ROWS, TOPK = 5, 4


def logits(seed: int = 0, rows: int = 3 * ROWS) -> GivenLogits:
    return GivenLogits(3 * torch.randn(rows, len(IDS), generator=torch.Generator().manual_seed(seed)))


def working(batch: SlotBatch, work: int, **changes: torch.Tensor) -> SlotBatch:
    return replace(batch, sampling=replace(batch.sampling, work=SAMPLING_WORK[work], **changes))


def context_of(batch: SlotBatch, level: int = 0) -> DrawContext:
    """`ROWS` nodes of a level; what comes before them does not matter."""
    return level_context(batch, None, torch.full((len(batch.slots), ROWS), -1), level, IDS)


def test_greedy_children_are_the_likeliest_tokens(make_batch) -> None:
    lazy_logits = logits()
    logs, found = top_children(lazy_logits, context_of(make_batch([9, 10, 11])), TOPK)
    values, columns = lazy_logits.given.log_softmax(1).topk(TOPK)
    torch.testing.assert_close(logs.view(-1, TOPK), values)
    assert torch.equal(found.view(-1, TOPK), columns)


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("work", range(len(SAMPLING_WORK)))
def test_the_first_child_is_what_a_chain_would_guess(make_batch, work: int, level: int) -> None:
    """Greedy slots and sampled ones in one batch, with filters and masks."""
    batch = working(
        make_batch([9, 10, 11]),
        work,
        temperature=torch.tensor([0.0, 0.8, 1.3], dtype=torch.float64),
        top_k=torch.tensor([64, 5, 64]),
        top_p=torch.tensor([1.0, 0.9, 0.5], dtype=torch.float64),
        stop_from=torch.tensor([50, 50, 0]),
        stop_ids=IDS[:3, None].contiguous(),
    )
    lazy_logits = logits()
    guesses = draw_after(lazy_logits, context_of(batch, level))
    for topk in (TOPK, 1):
        assert torch.equal(IDS[top_children(lazy_logits, context_of(batch, level), topk)[1][:, :, 0]], guesses)


def test_what_filters_drop_is_worth_nothing(make_batch) -> None:
    batch = working(make_batch([9, 10, 11], temperature=1.0), -1, top_k=torch.tensor([2, 64, 1]))
    logs, columns = top_children(logits(), context_of(batch), TOPK)
    assert (logs > -torch.inf).sum(2).tolist() == [[2] * ROWS, [TOPK] * ROWS, [1] * ROWS]
    assert all(len(set(row)) == TOPK for row in columns.flatten(0, 1).tolist())


def test_siblings_are_distinct_also_where_all_are_equal(make_batch) -> None:
    flat = GivenLogits(torch.zeros(3 * ROWS, len(IDS)))
    logs, columns = top_children(flat, context_of(make_batch([9, 10, 11])), TOPK)
    assert torch.equal(columns, torch.arange(TOPK).expand(3, ROWS, TOPK)), "the lower columns"
    assert logs.unique().numel() == 1


@pytest.mark.parametrize("certain", [True, False], ids=["certain", "equal"])
@pytest.mark.parametrize("num_guesses", range(1, 21))
def test_ties_never_orphan_a_child(num_guesses: int, certain: bool) -> None:
    """Three levels of four: first all of probability 1 (as far as floats tell), then a quarter each."""
    step = 0.0 if certain else float(torch.tensor(0.25).log())
    log_probs = torch.tensor([[step] * 4 + [2 * step] * 16])
    parents = torch.tensor([[-1] * 4 + [node for node in range(4) for _ in range(4)]])
    tokens = torch.arange(20)[None]
    guesses, columns = select_tree(log_probs, tokens, parents, num_guesses)
    kept = guesses[:, 0].tolist()
    assert kept == list(range(num_guesses))
    for place, (token, column) in enumerate(zip(kept, columns[:, 0].tolist(), strict=True)):
        assert column <= place, "parents come first"
        assert (column == 0) == (token < 4)
        assert column == 0 or kept[column - 1] == parents[0, token]


LEVELS = 4


def marginals(work: int, batch: SlotBatch) -> tuple[MarginalLogits, SlotBatch]:
    """The logits of a block, and a batch of greedy and of sampled slots."""
    mixed = {"temperature": torch.tensor([0.0, 0.8, 1.3], dtype=torch.float64), "top_k": torch.tensor([64, 5, 64])}
    values = torch.arange(3 * LEVELS).view(LEVELS, 3, 1)
    return MarginalLogits(lambda rows: GivenLogits(logits().given[rows[:, 0]]), values), working(batch, work, **mixed)


@pytest.mark.parametrize("work", range(len(SAMPLING_WORK)))
def test_the_tree_of_a_blocks_best_tokens_is_its_chain(make_batch, work: int) -> None:
    """However tokens are drawn."""
    block, batch = marginals(work, make_batch([9, 10, 11]))
    chain = BlockGuesser(IDS).guess(block, batch, LEVELS, LEVELS)
    tree = BlockGuesser(IDS, trees=Marginals(1)).guess(block, batch, LEVELS, LEVELS)
    assert torch.equal(tree.tokens, chain.tokens)
    assert tree.parents is not None and tree.parents.t().tolist() == [list(range(LEVELS))] * 3


@pytest.mark.parametrize("work", [0, 1, -1])
def test_the_best_nodes_of_a_block(make_batch, work: int) -> None:
    """Of each level the best tokens, with the noise that the target draws by there, after any of the level before."""
    block, batch = marginals(work, make_batch([9, 10, 11]))
    found = Marginals(TOPK).best_nodes(block, batch, IDS, LEVELS, 12)
    levels, path = list[list[list[tuple[float, int]]]](), list[torch.Tensor]()
    for level in range(LEVELS):
        context = chain_context(batch, path, IDS)
        lazy_logits = GivenLogits(logits().given[3 * level : 3 * level + 3])
        logs, columns = (part.squeeze(1) for part in top_children(lazy_logits, context, TOPK))
        levels.append([list(zip(a.tolist(), IDS[c].tolist(), strict=True)) for a, c in zip(logs, columns, strict=True)])
        path.append(draw_after(lazy_logits, context).squeeze(1))
    assert found.parents is not None
    for slot in range(3):
        tokens, parents = marginal_nodes([level[slot] for level in levels], 12)
        missing = 12 - len(tokens)
        assert found.tokens[:, slot].tolist() == tokens + [-1] * missing
        assert found.parents[:, slot].tolist() == parents + [0] * missing


def test_each_level_knows_the_best_guesses_before_it(make_batch) -> None:
    """So a logit processor sees the history that a chain has."""
    block, batch = marginals(1, make_batch([9, 10, 11]))
    asked: list[list[torch.Tensor]] = []

    class Recorded:
        def together(self) -> GivenLogits:
            raise AssertionError("what is drawn is drawn level by level")

        def following(self, guesses: Sequence[torch.Tensor]) -> ComputedLogits:
            asked.append(list(guesses))
            return block.following(guesses)

    Marginals(TOPK).best_nodes(Recorded(), batch, IDS, LEVELS, 12)
    chain = BlockGuesser(IDS).guess(block, batch, LEVELS, LEVELS).tokens
    assert [len(guesses) for guesses in asked] == list(range(LEVELS))
    assert torch.equal(torch.stack(asked[-1]), chain[:-1])


class RecordedDrafter:
    """A `Drafter` whose rows are kept: what it hands on is the number of its row."""

    target_ids, first_row = IDS, 1

    def __init__(self) -> None:
        self.rows: list[RowBatch] = []

    def enter(self, batch: SlotBatch, learnt: torch.Tensor) -> torch.Tensor:
        return learnt

    def features(self, drafted: torch.Tensor) -> torch.Tensor:
        return drafted[:, None].double()

    def advance(self, tokens: torch.Tensor, features: torch.Tensor, rows: RowBatch) -> torch.Tensor:
        self.rows.append(rows)
        return tokens

    def logits(self, drafted: torch.Tensor) -> GivenLogits:
        return logits(rows=len(drafted))


@pytest.mark.parametrize(("num_guesses", "num_levels"), [(12, 3), (2, 2), (1, 1)])
def test_the_nodes_of_a_level_are_side_by_side_in_positions_and_after_one_another_in_the_cache(
    make_batch, num_guesses: int, num_levels: int
) -> None:
    """As many levels as so many guesses can have."""
    drafter, batch = RecordedDrafter(), make_batch([9, 10, 11])
    proposer = TreeProposer(drafter, Branching(3, TOPK), scratch_start=1000)
    proposer.propose(batch, batch.slots, num_guesses)
    assert len(drafter.rows) == num_levels - 1, "the last level's rows are not run"
    for level, rows in enumerate(drafter.rows, start=1):
        assert rows.positions.view(3, TOPK).equal((batch.lengths + level)[:, None].expand(3, TOPK))
        first = 1000 + batch.slots * 2 * TOPK + (level - 1) * TOPK
        assert rows.cache_rows.view(3, TOPK).equal(first[:, None] + torch.arange(TOPK))

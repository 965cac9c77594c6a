"""What comes before each row, of chains and trees: against paths walked by hand, over a pool of pages in no order."""

import random
from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import Candidates
from support.no_processors import no_processors
from torch import Tensor

from overlap_spec.sampling.context import DrawContext
from overlap_spec.speculative.interfaces import SlotBatch, Window, chain_context, level_context, window_context

VOCAB, PAGE_SIZE, IDS = 200, 4, torch.arange(200)


class Requests:
    """Three requests with histories of some lengths; what the pool holds after them is stale."""

    def __init__(self, make_batch, seed: int) -> None:
        self.rng = random.Random(seed)
        self.histories = [[self.rng.randrange(VOCAB) for _ in range(length)] for length in (1, 7, 18)]
        processors = no_processors(VOCAB, num_pages=40, page_size=PAGE_SIZE)
        processors.pool.tokens.random_(0, VOCAB)
        table = (torch.randperm(39) + 1)[:30].view(3, 10).int()
        for row, history in enumerate(self.histories):
            for position, token in enumerate(history):
                page = int(table[row, position // PAGE_SIZE])
                processors.pool.tokens[page * PAGE_SIZE + position % PAGE_SIZE] = token
        table[0, 3:] = 1 << 28  # unwritten memory, which is not followed
        batch = make_batch([len(history) - 1 for history in self.histories])
        sampling = replace(batch.sampling, processors=processors)
        self.batch: SlotBatch = replace(batch, page_table=table, sampling=sampling)

    def tokens(self, count: int) -> Tensor:
        return torch.tensor([[self.rng.randrange(VOCAB) for _ in range(count)] for _ in self.histories])


def assert_recent(context: DrawContext, expected: list[list[list[int]]]) -> None:
    """`expected`: all that comes before each row of each request."""
    for count in (1, 2, 5, 9):
        found = context.recent(count).tolist()
        for rows, wanted in zip(found, expected, strict=True):
            assert rows == [([-1] * count + before)[-count:] for before in wanted]
    for root, rows, wanted in zip(context.history.roots.tolist(), context.guesses.tolist(), expected, strict=True):
        guessed = [before[root + 1 :] for before in wanted]
        assert rows == [[-1] * (context.depth - len(own)) + own for own in guessed]


@pytest.mark.parametrize("width", [1, 2, 5])
def test_windows_of_chains(make_batch, width: int) -> None:
    requests = Requests(make_batch, width)
    roots = torch.tensor([history[-1:] for history in requests.histories])
    tokens = torch.cat((roots, requests.tokens(width - 1)), 1)
    positions = requests.batch.lengths[:, None] + torch.arange(width)
    context = window_context(Window(tokens, positions), requests.batch, IDS)
    assert context.depth == width - 1 and torch.equal(context.positions, positions + 1)
    rows = [history[:-1] for history in requests.histories]
    assert_recent(
        context, [[row + own[: 1 + j] for j in range(width)] for row, own in zip(rows, tokens.tolist(), strict=True)]
    )


def test_windows_of_trees(make_batch) -> None:
    requests, parents = Requests(make_batch, 7), [0, 0, 0, 1, 3, 2, 4]
    roots = torch.tensor([history[-1:] for history in requests.histories])
    tokens = torch.cat((roots, requests.tokens(6)), 1)
    window = Window(tokens, tokens, torch.tensor([parents] * 3), num_levels=4)
    paths = [[1], [2], [1, 3], [1, 3, 4], [2, 5], [1, 3, 4, 6]]
    context = window_context(window, requests.batch, IDS)
    assert context.depth == 4
    assert_recent(
        context,
        [
            [history, *(history + [own[column] for column in path] for path in paths)]
            for history, own in zip(requests.histories, tokens.tolist(), strict=True)
        ],
    )


@pytest.mark.parametrize("num_guesses", [0, 1, 3])
def test_chains_on_their_way(make_batch, num_guesses: int) -> None:
    requests = Requests(make_batch, num_guesses)
    guesses = requests.tokens(num_guesses) if num_guesses else torch.zeros(3, 0, dtype=torch.int64)
    context = chain_context(requests.batch, guesses.unbind(1), IDS)
    assert context.positions.tolist() == [[len(history) + num_guesses] for history in requests.histories]
    expected = [[history + own] for history, own in zip(requests.histories, guesses.tolist(), strict=True)]
    assert_recent(context, expected)


def test_trees_on_their_way(make_batch) -> None:
    """Two levels are made, of which two nodes have children next; candidates that are not made yet are no memory."""
    requests = Requests(make_batch, 3)
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1, 1 << 40]] * 3)
    grown = Candidates(torch.zeros(3, 7), requests.tokens(7), parents)
    nodes = torch.tensor([[2, 4], [5, 3], [4, 5]])
    context = level_context(requests.batch, grown, nodes, 2, IDS)
    assert context.positions.tolist() == [[len(history) + 2] * 2 for history in requests.histories]
    expected = [
        [history + [own[above[node]], own[node]] for node in chosen]
        for history, own, above, chosen in zip(
            requests.histories, grown.tokens.tolist(), parents.tolist(), nodes.tolist(), strict=True
        )
    ]
    assert_recent(context, expected)
    first = level_context(requests.batch, None, torch.full((3, 1), -1), 0, IDS)
    assert_recent(first, [[history] for history in requests.histories])


def test_committed_tokens_end_with_the_root(make_batch) -> None:
    requests = Requests(make_batch, 1)
    committed = chain_context(requests.batch, (), IDS).committed
    assert committed.shape == (3, 10 * PAGE_SIZE)
    for row, history in zip(committed.tolist(), requests.histories, strict=True):
        assert row == history + [-1] * (10 * PAGE_SIZE - len(history))

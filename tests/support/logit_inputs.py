"""Requests that ask for everything that parameters can do to logits, for the ops that change logits."""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import BUDGET_WIDTH, LogitRules, RowHistory, TokenRows, neutral_rules
from torch import Tensor

from overlap_spec.features.thinking.worker import packed_budget

VOCAB, PAGES, PAGE_SIZE = 3000, 70, 16
MOST_WORDS, WORD = 12, 8
IDS = 40  # distinct tokens of histories and rules: multiples of 7


@dataclass(frozen=True)
class LogitInputs:
    """B requests, R rows each, N columns."""

    rules: LogitRules
    history: RowHistory  # nothing is counted yet
    logits: Tensor  # [B, R, N] f32
    token_ids: Tensor  # [N] i64


def no_rules(size: int, vocab_size: int, device: str = "cpu") -> LogitRules:
    """Of requests that ask for nothing."""
    ints = torch.zeros(size, dtype=torch.int64, device=device)
    return LogitRules(
        slots=torch.arange(size, device=device),
        output_from=ints,
        stop_from=ints,
        stop_ids=ints[:, None] - 1,
        **neutral_rules(size, vocab_size, device),
    )


def logit_inputs(size: int, num_rows: int, depth: int, columns: int, device: str = "cpu") -> LogitInputs:
    """Histories of 0 to more than 1024 tokens, few of them distinct; every other request has biases, and bad words."""
    random = torch.Generator().manual_seed(size * 100 + num_rows * 10 + depth)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    pool = ints(-1, IDS, size * PAGES * PAGE_SIZE).int() * 7
    pool[::50] = VOCAB
    table = torch.randperm(size * PAGES, generator=random).view(size, PAGES).int()
    roots = ints(-1, PAGES * PAGE_SIZE - depth - 2, size)
    output_from = (roots + 1) // 2
    output_from[1::4] = roots[1::4].clamp(min=0)  # an output of one token
    levels = ints(0, depth + 1, size, num_rows)
    is_guess = torch.arange(depth, 0, -1) <= levels[:, :, None]
    guesses = (ints(-1, IDS, size, num_rows, depth) * 7).clamp(min=-1).masked_fill(~is_guess, -1)
    logits = torch.randn(size, num_rows, columns, generator=random)
    logits[:, :, ::5] = -torch.inf
    odd, store = torch.arange(size) % 2, TokenRows(pool, table, PAGE_SIZE)
    rules = LogitRules(
        slots=torch.arange(size),
        penalties=torch.rand(size, 3, generator=random, dtype=torch.float64) * 1.5 + 0.2,
        output_from=output_from,
        stop_from=roots + 1 + ints(0, depth + 2, size),
        stop_ids=(ints(-1, IDS, size, 5) * 7).clamp(min=-1),
        has=torch.stack((odd, odd * MOST_WORDS), 1),
        bias=torch.randn(size, VOCAB, generator=random),
        words=_words(store, roots, guesses, random),
        budgets=_budgets(roots + 1 - output_from, random),
    )
    history = RowHistory(store, roots, roots[:, None] + 1 + levels, guesses, guesses)
    token_ids = torch.randperm(VOCAB, generator=random)[:columns]
    store = TokenRows(pool.to(device), table.to(device), PAGE_SIZE)
    history = RowHistory(store, *(each.to(device) for each in history[1:]))
    return LogitInputs(
        LogitRules(*(each.to(device) for each in rules)), history, logits.to(device), token_ids.to(device)
    )


def _words(store: TokenRows, roots: Tensor, guesses: Tensor, random: torch.Generator) -> Tensor:
    """Words of 1 to 6 tokens, each of which begins with what comes before one of its request's rows."""
    words = torch.full((len(roots), MOST_WORDS, WORD), -1, dtype=torch.int32)
    words[:, :, -1] = torch.randint(0, IDS, words.shape[:2], generator=random).int() * 7
    for request, root in enumerate(roots.tolist()):
        pages = store.page_table[request].long()
        positions = torch.arange(max(root - 8, 0), root + 1)
        history = store.pool[pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE]
        for place in range(MOST_WORDS):
            own = guesses[request, place % guesses.shape[1]]
            before = torch.cat((history, own[own >= 0].int()))[-(place % 6) :] if place % 6 else history[:0]
            words[request, place, WORD - 1 - len(before) : WORD - 1] = before
    return words


def _budgets(used: Tensor, random: torch.Generator) -> Tensor:
    """Most of them end about where the output does."""
    rows = []
    for count in used.tolist():
        tokens, is_open, opening, closing = torch.randint(0, 4, (4,), generator=random).tolist()
        markers = [[7 * i for i in range(1, 2 + length)] for length in (opening, closing)]
        rows.append(packed_budget(max(count - tokens, -1), is_open > 0, *markers))
    return torch.tensor(rows).view(-1, BUDGET_WIDTH)

"""Requests with penalties and biases, for the ops that change logits."""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import Penalized, TokenRows
from torch import Tensor

VOCAB, PAGES, PAGE_SIZE = 3000, 70, 16


@dataclass(frozen=True)
class LogitInputs:
    """B requests, R rows each, N columns."""

    rows: TokenRows
    ends: Tensor  # [B] i64
    output_from: Tensor  # [B] i64
    asked: Penalized
    logits: Tensor  # [B, R, N] f32
    guesses: Tensor  # [B, R, D] i64
    token_ids: Tensor  # [N] i64


def logit_inputs(size: int, num_rows: int, depth: int, columns: int, device: str = "cpu") -> LogitInputs:
    """Histories of 0 to more than 1024 tokens, few of them distinct; every other request has biases."""
    random = torch.Generator().manual_seed(size * 100 + num_rows * 10 + depth)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random).to(device)

    pool = ints(-1, 40, size * PAGES * PAGE_SIZE).int() * 7
    pool[::50] = VOCAB
    table = torch.randperm(size * PAGES, generator=random).view(size, PAGES).int().to(device)
    ends = ints(0, PAGES * PAGE_SIZE, size)
    asked = Penalized(
        torch.rand(size, 3, generator=random, dtype=torch.float64).to(device) * 1.5 + 0.2,
        torch.arange(size, device=device),
        torch.stack((torch.arange(size) % 2, torch.zeros(size).long()), 1).to(device),
        torch.randn(size, VOCAB, generator=random).to(device),
    )
    logits = torch.randn(size, num_rows, columns, generator=random).to(device)
    logits[:, :, ::5] = -torch.inf
    guesses = ints(-1, 40, size, num_rows, depth) * 7
    token_ids = torch.randperm(VOCAB, generator=random)[:columns].to(device)
    rows = TokenRows(pool, table, PAGE_SIZE)
    return LogitInputs(rows, ends, ends // 2, asked, logits, guesses.clamp(min=-1), token_ids)

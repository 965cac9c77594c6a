"""Inputs of the ops of grammars."""

import random

import torch
from torch import Tensor

MASK_SHAPES = [(1, 1, 1), (3, 4, 97), (2, 2, 2050), (4, 1, 64)]


def mask_inputs(batch: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, and masks of more slots and window columns than there are in the step."""
    generator = torch.Generator().manual_seed(batch * 1000 + columns)
    logits = torch.randn(batch, rows, columns, generator=generator)
    words = 2 * -(-columns // 64)
    bits = torch.randint(-(2**31), 2**31, (batch + 3, rows + 2, words), generator=generator).int()
    active = torch.randint(0, 2, (batch + 3,), generator=generator).int()
    slots = torch.randperm(batch + 3, generator=generator)[:batch]
    active[slots[0]] = 1
    return logits, bits, active, slots


def forced_state(rng: random.Random, is_tree: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Windows of a few different tokens, so that forced ones are often there; parents before children."""
    num_slots, width, most = 5, rng.choice([2, 5, 8]), rng.randint(1, 3)
    most = min(most, width - 1)
    window = [[rng.randrange(9), *(rng.randrange(3) for _ in range(width - 1))] for _ in range(num_slots)]
    above = [[0, *(rng.randrange(column) for column in range(1, width))] for _ in range(num_slots)]
    slots = rng.sample(range(num_slots), 3)
    counts = [rng.randint(0, most) for _ in slots]
    forced = [[*(rng.randrange(3) for _ in range(count)), *[-1] * (most - count)] for count in counts]
    parents = torch.tensor(above) if is_tree else None
    return torch.tensor(window), parents, torch.tensor(slots), torch.tensor(forced)

"""Inputs of `gumbel_argmax`: greedy and sampled slots, ties, forbidden columns, ids of a smaller vocabulary."""

import torch
from torch import Tensor

DRAWING_SHAPES = [(1, 1, 1), (2, 3, 17), (3, 4, 1024), (5, 2, 2500)]  # slots, rows, columns


def drawing_inputs(batch: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, ...]:
    """logits [B, R, N] f32, positions [B, R] (of a wider tensor), temperature, seed [B], token ids [N]."""
    generator = torch.Generator().manual_seed(batch * 1000 + columns)
    logits = torch.randn(batch, rows, columns, generator=generator).mul(4).round()  # equal ones are common
    logits[:, :, 1::5] = -torch.inf
    positions = torch.randint(1, 1 << 20, (batch, rows + 2), generator=generator)[:, 1:-1]
    temperature = torch.tensor([0.0, 1.0, 0.3], dtype=torch.float64).repeat(batch)[:batch]
    seed = torch.randint(-(1 << 62), 1 << 62, (batch,), generator=generator)
    token_ids = torch.randperm(columns * 2, generator=generator)[:columns].sort().values
    return tuple(tensor.to(device) for tensor in (logits, positions, temperature, seed, token_ids))

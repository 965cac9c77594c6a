"""Inputs of `gumbel_argmax`: greedy and sampled slots, ties, forbidden columns, ids of a smaller vocabulary."""

import torch
from overlap_spec_kernels import gumbel
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


def near_ties(batch: int, columns: int, device: torch.device) -> tuple[Tensor, ...]:
    """Inputs in which the two leading columns of each row differ by some 1e-7 in logit / T + noise."""
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(batch, 1, columns, generator=generator)
    positions, seed = torch.arange(batch)[:, None], torch.arange(batch) * 1001
    temperature, token_ids = torch.full((batch,), 0.7, dtype=torch.float64), torch.arange(columns)
    noise = gumbel(seed, positions.flatten(), token_ids)
    best, other = torch.randint(columns, (2, batch, 1), generator=generator)
    wanted = 0.7 * (60 - noise)  # far above the others
    logits[:, 0] = logits[:, 0].scatter(1, best, wanted.gather(1, best).float())
    logits[:, 0] = logits[:, 0].scatter(1, other, wanted.gather(1, other).float())
    return tuple(tensor.to(device) for tensor in (logits, positions, temperature, seed, token_ids))


def cutoff_inputs(batch: int, rows: int, columns: int, device: torch.device, spread: float) -> tuple[Tensor, ...]:
    """logits [B, R, N] f32 with forbidden ones, temperature, top_k, top_p, min_p [B]: filters alone and together.

    `spread`: their standard deviation; 0: a few distinct values, most of them equal to many others.
    """
    generator = torch.Generator().manual_seed(batch * 1000 + columns)
    logits = torch.randn(batch, rows, columns, generator=generator)
    logits = logits.mul(2).round() if spread == 0 else logits * spread
    logits[:, :, 1::7] = -torch.inf
    off = 1 << 62
    cases = [
        (0.7, 20, 0.8, 0.0), (0.6, off, 0.9, 0.0), (1.0, off, 1.0, 0.05), (0.7, off, 1.0, 0.0), (0.0, 5, 0.5, 0.3),
        (1.3, columns // 2, 1.0, 0.0), (0.3, 1, 0.99, 0.3), (2.0, 300, 0.3, 0.01), (1e-9, off, 0.5, 0.0),
    ]  # fmt: skip
    temperature, top_k, top_p, min_p = zip(*(cases[i % len(cases)] for i in range(batch)), strict=True)
    doubles = (torch.tensor(values, dtype=torch.float64) for values in (temperature, top_p, min_p))
    temperature, top_p, min_p = doubles
    return tuple(x.to(device) for x in (logits, temperature, torch.tensor(top_k).clamp(min=1), top_p, min_p))

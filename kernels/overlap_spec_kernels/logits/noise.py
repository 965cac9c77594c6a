"""Gumbel noise as a pure function of (seed, absolute position, token id).

A token drawn as argmax(logits / T + g) is a sample of softmax(logits / T); because g depends on nothing
but its key, the same request draws the same tokens with any method, depth, batch or cache state. The
generator is SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195): its output function applied
to a counter, which here is the key.
"""

import torch
from torch import Tensor

# As signed 64-bit integers: torch's int64 arithmetic wraps, which is what the generator needs.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's output function, a bijection of 64-bit integers. Shapes: any, i64 -> i64."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def gumbel(seed: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for each (row, token). Sync: never.

    Shapes: seed, positions [R] i64 (broadcast against each other), token_ids [N] i64 -> [R, N] f64.
    """
    rows = mix64(mix64(seed + _GAMMA) ^ (positions * _GAMMA))
    bits = mix64(rows[:, None] ^ mix64(token_ids * _GAMMA + 1)[None, :])
    return -torch.log(-torch.log(_unit(bits)))


def uniform(seed: Tensor, positions: Tensor) -> Tensor:
    """A number in (0, 1) for each row. Sync: never. Shapes: seed, positions alike, i64 -> f64."""
    return _unit(mix64(mix64(seed + _GAMMA) ^ (positions * _GAMMA)))


def stream(seed: Tensor, purpose: int) -> Tensor:
    """Seeds of noise that is independent of the seeds' own, and of that for other purposes. Shapes: i64 -> i64."""
    return mix64(mix64(seed) ^ purpose)


def _unit(bits: Tensor) -> Tensor:
    """53 bits and a half, so that neither end is ever met. Shapes: i64 -> f64."""
    return (_shift_right(bits, 11).to(torch.float64) + 0.5) * 2.0**-53


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's >> copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

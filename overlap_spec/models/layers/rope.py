"""Rotary position tables for the Llama family.

A table has one row per position: cosines of the d/2 frequencies, then their sines (rotate-half layout).
Angles are computed in float32 as the reference implementations do, whatever the model's dtype, so that far
positions agree with them to the bit; a float64 model gets the same table, widened.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec.errors import CheckpointError

DEFAULT_THETA = 10000.0
PROPORTIONAL = "proportional"
OF_EACH_PAIR = ("default", "linear", "llama3")  # kinds that may turn a part of a head: no pair asks how many there are


@dataclass(frozen=True)
class RopeConfig:
    """The frequencies and their scaling. `scaling` is the checkpoint's own dict (with its rope type)."""

    kind: str  # default | linear | llama3 | yarn | divisors | proportional
    theta: float
    head_dim: int  # columns of a head that are rotated
    max_positions: int  # the checkpoint's; the table may be longer
    scaling: Mapping[str, Any]
    num_fixed: int = 0  # pairs of a head, after the rotated ones, that are not rotated

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int, origin: str, part: float | None = None) -> "RopeConfig":
        """Read `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old).

        `part`: of each head that is rotated, where the config does not say; None: always the whole head.
        Raises: CheckpointError naming `origin` and the unsupported rope type, or the part.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise CheckpointError(f"{origin}: rope_scaling must be null or an object, found {scaling!r}")
        scaling = {key: value for key, value in scaling.items() if value is not None}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "default" and scaling.get("factor", 1) != 1:
            raise CheckpointError(f"{origin}: rope_scaling has a factor, and no rope_type that uses it")
        if kind not in _FREQUENCIES:
            raise CheckpointError(
                f"{origin}: rope type {kind!r} is not supported; supported: {', '.join(sorted(_FREQUENCIES))}"
            )
        factor = 1.0 if kind == PROPORTIONAL else _rotated_part(config, 1.0 if part is None else part)
        if scaling.get("mrope_section") or (part is None and factor != 1.0):
            raise CheckpointError(
                f"{origin}: rotary position with mrope sections or over part of a head is not supported"
            )
        rotated = int(head_dim * factor)
        if factor != 1.0 and (rotated < 2 or rotated % 2):
            raise CheckpointError(f"{origin}: partial_rotary_factor rotates {rotated} of {head_dim}: expected pairs")
        if factor != 1.0 and kind not in OF_EACH_PAIR:
            raise CheckpointError(f"{origin}: rope type {kind!r} over part of a head is not supported")
        theta = scaling.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
        if isinstance(theta, list):
            raise CheckpointError(f"{origin}: rope_theta must be a number, found a list of {len(theta)}")
        max_positions = int(config.get("max_position_embeddings") or 2048)
        try:
            rope = cls(kind, float(theta), rotated, max_positions, scaling, (head_dim - rotated) // 2)
            rope.frequencies()
        except KeyError as missing:
            raise CheckpointError(f"{origin}: rope type {kind!r} needs {missing} beside it, which is missing") from None
        return rope

    def frequencies(self) -> tuple[Tensor, float]:
        """Returns the angle per position of each pair, and the factor on cosines and sines. Shapes: [d / 2] f32."""
        return _FREQUENCIES[self.kind](self)

    def table(self, num_positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Shapes: [num_positions, d], float64 for a float64 model, else float32."""
        inverse, factor = self.frequencies()
        assert factor == 1.0 or not self.num_fixed, "pairs that are not rotated keep their length"
        inverse = F.pad(inverse, (0, self.num_fixed))
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse
        table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1)
        return table.to(device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)


def _rotated_part(config: Mapping[str, Any], default: float) -> float:
    """The part of each head that is rotated. `default`: where the config does not say."""
    parameters = config.get("rope_parameters") or {}
    return float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or default)


def _powers(rope: RopeConfig) -> Tensor:
    return rope.theta ** (torch.arange(0, rope.head_dim, 2, dtype=torch.int64).to(torch.float32) / rope.head_dim)


def _default(rope: RopeConfig) -> tuple[Tensor, float]:
    return 1.0 / _powers(rope), 1.0


def _linear(rope: RopeConfig) -> tuple[Tensor, float]:
    return 1.0 / _powers(rope) / float(rope.scaling["factor"]), 1.0


def _llama3(rope: RopeConfig) -> tuple[Tensor, float]:
    """Slow frequencies are divided, fast ones kept, those in between blended (Llama 3.1)."""
    factor = float(rope.scaling["factor"])
    low, high = float(rope.scaling["low_freq_factor"]), float(rope.scaling["high_freq_factor"])
    trained = rope.scaling["original_max_position_embeddings"]
    inverse = 1.0 / _powers(rope)
    wavelength = 2 * math.pi / inverse
    blend = (trained / wavelength - low) / (high - low)
    between = (1 - blend) * inverse / factor + blend * inverse
    slow, fast = wavelength > trained / low, wavelength < trained / high
    return torch.where(slow, inverse / factor, torch.where(fast, inverse, between)), 1.0


def _divisors(rope: RopeConfig) -> tuple[Tensor, float]:
    """One divisor per frequency, as a .gguf stores Llama 3's scaling."""
    divisors = torch.tensor(rope.scaling["divisors"], dtype=torch.float32)
    return 1.0 / (_powers(rope) * divisors), 1.0


def _proportional(rope: RopeConfig) -> tuple[Tensor, float]:
    """Those of the whole head, of which only the first are not 0 (Gemma 4)."""
    turned = int(float(rope.scaling.get("partial_rotary_factor", 1.0)) * rope.head_dim // 2)
    inverse = 1.0 / _powers(rope) / float(rope.scaling.get("factor", 1.0))
    return torch.where(torch.arange(rope.head_dim // 2) < turned, inverse, 0.0), 1.0


def _yarn(rope: RopeConfig) -> tuple[Tensor, float]:
    """Peng et al. 2023, arXiv:2309.00071: divide frequencies that turn rarely within the trained length."""
    scaling, dim = rope.scaling, rope.head_dim
    factor = float(scaling["factor"])
    trained = scaling.get("original_max_position_embeddings") or rope.max_positions

    def pair_that_turns(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair_that_turns(float(scaling.get("beta_fast") or 32))
    high = pair_that_turns(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))
    kept = 1 - ramp.clamp(0, 1)
    powers = _powers(rope)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, _yarn_factor(scaling, factor)


def _yarn_factor(scaling: Mapping[str, Any], factor: float) -> float:
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return yarn_mscale(factor, float(scaling["mscale"])) / yarn_mscale(factor, float(scaling["mscale_all_dim"]))
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """By how much queries and keys grow where positions are stretched by `factor`, so that attention stays sharp."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "divisors": _divisors,
    PROPORTIONAL: _proportional,
}

"""What steps and prompts of an engine take at least on one of its ranks: its part of bytes and operations, and sums."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import torch
from overlap_spec_kernels.launch import assuming
from torch import Tensor

from overlap_spec import hub
from overlap_spec.config import EngineConfig, Machine
from overlap_spec.config.resolve import resolve
from overlap_spec.messages import Roofline
from overlap_spec.metrics.step_floor import Ceiling, step_floor
from overlap_spec.models.layers.experts import MixtureMLP
from overlap_spec.models.layers.parallel import WHOLE, Rank
from overlap_spec.worker.build import load_models
from overlap_spec.worker.startup.geometry import torch_dtype
from overlap_spec.worker.startup.start_costs import roofline

META, HOPPER = torch.device("meta"), (9, 0)
FORMS = {"one-shot": "one_shot_us", "two-shot": "two_shot_us", "NCCL": "nccl_us"}  # columns of `reductions.py`
Row = dict[str, Any]


@dataclass(frozen=True)
class Card:
    """What is known of a GPU. `times`: of sums over ranks (`times_of`); empty: nothing."""

    ceiling: Ceiling
    times: Sequence[tuple[int, float]]


class Outlined:
    """Ranks of a model that is on no device: its work is counted, and nothing is computed."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        return part.repeat(1, self.ranks)


@dataclass(frozen=True)
class Needs:
    """What forwards of rank 0 read and compute, for floors in milliseconds. The roofline's rates are left open."""

    roofline: Roofline
    width: int
    num_sums: int  # over ranks, of a forward of the target
    row_bytes: int  # of hidden states
    num_mixtures: int = 0
    top_k: int = 0
    expert_bytes: int = 0

    def step(self, batch: int, context: int, experts: float | None, card: Card) -> Row:
        """A decode step. `context`: tokens of all slots; `experts`: distinct ones that a layer reads, if it has any."""
        needed = msgspec.structs.replace(self.roofline, **asdict(card.ceiling))
        if experts is not None:
            more = self.num_mixtures * (experts - self.top_k) * self.expert_bytes
            target = msgspec.structs.replace(needed.target, weight_bytes=int(needed.target.weight_bytes + more))
            needed = msgspec.structs.replace(needed, target=target)
        return self._with_sums(step_floor(needed, batch, self.width, context), batch * self.width, card)

    def prompt(self, num_tokens: int, card: Card) -> Row:
        """A prompt's first token: operations alone."""
        work, pairs, rate = self.roofline.target, num_tokens * (num_tokens + 1) / 2, card.ceiling.flop_per_s
        flop = work.row_flop * num_tokens + work.pair_flop * pairs + work.head_flop
        return self._with_sums(flop / rate if rate else 0.0, num_tokens, card)

    def _with_sums(self, seconds: float, rows: int, card: Card) -> Row:
        """`sums_ms`: of the floor; None where they are not known, and are left out."""
        if self.num_sums and not card.times:
            return {"floor_ms": round(1000 * seconds, 4), "sums_ms": None}
        sums_ms = self.num_sums * microseconds(card.times, rows * self.row_bytes) / 1000 if self.num_sums else 0.0
        return {"floor_ms": round(1000 * seconds + sums_ms, 4), "sums_ms": round(sums_ms, 4)}


def needs_of(config: EngineConfig, machine: Machine) -> Needs:
    """By the engine's own loaders, on headers. Raises: ConfigError, CheckpointError where there is no such engine."""
    settings, _ = resolve(config, hub.resolve_model(config), machine)
    spec, _ = hub.resolve_drafting(settings.spec, settings.model.files, config)
    rank = WHOLE if settings.ranks == 1 else Rank(0, settings.ranks, Outlined(0, settings.ranks))
    with assuming(HOPPER if settings.model.device == "cuda" else None):
        models = load_models(msgspec.structs.replace(settings, spec=spec), META, lambda done, total: None, rank)
    target, dtype = models.target, torch_dtype(settings.model.dtype)
    mixtures = [layer.mlp for layer in getattr(target, "layers", ()) if isinstance(layer.mlp, MixtureMLP)]
    needs = Needs(
        roofline(models, dtype, META, Ceiling(1.0, 1.0)),
        spec.width,
        2 * target.num_layers if settings.ranks > 1 else 0,
        target.hidden_size * dtype.itemsize,
    )
    if not mixtures:
        return needs
    top_k, expert_bytes = mixtures[0].router.choice.top_k, mixtures[0].experts.work.weight_bytes
    return replace(needs, num_mixtures=len(mixtures), top_k=top_k, expert_bytes=expert_bytes)


def times_of(sums: Sequence[Row]) -> list[tuple[int, float]]:
    """Microseconds by bytes, ascending: the least of those that were measured of a size."""
    least: dict[int, float] = {}
    for row in sums:
        us = float(row[FORMS[row["taken"]]])
        least[row["bytes"]] = min(us, least.get(row["bytes"], us))
    return sorted(least.items())


def microseconds(times: Sequence[tuple[int, float]], num_bytes: int) -> float:
    """Of a sum of this size: between the measured ones on a line, beyond them as the last one."""
    for (low, low_us), (high, high_us) in pairwise(times):
        if low <= num_bytes <= high:
            return low_us + (high_us - low_us) * (num_bytes - low) / (high - low)
    return times[0][1] if num_bytes < times[0][0] else times[-1][1]

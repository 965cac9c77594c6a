"""How the slots of a step draw their tokens, and which kinds of drawing a step can have. Shapes: spec/types.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from overlap_spec.sampling.processors import LogitProcessors


@dataclass(frozen=True)
class SamplingWork:
    """What kinds of sampling a step has to do, known to the host: greedy requests alone launch none of it."""

    sampled: bool
    filtered: bool  # some request has top_k, top_p or min_p
    processed: bool  # some request's parameters change its logits: min_new_tokens
    log_probs: bool = False  # some request wants log-probs


# What a step can be prepared for: greedy, sampled, and everything (which does the others' work too, at its price).
SAMPLING_WORK = (
    SamplingWork(False, False, False),
    SamplingWork(True, False, False),
    SamplingWork(True, True, True),
    SamplingWork(True, True, True, log_probs=True),
)


@dataclass(frozen=True)
class Sampling:
    """How each slot of a step draws its tokens, gathered from the slot rows."""

    temperature: Tensor  # [B] f64, 0 = greedy
    top_k: Tensor  # [B] i64, V or more = all
    top_p: Tensor  # [B] f64
    min_p: Tensor  # [B] f64
    seed: Tensor  # [B] i64
    stop_from: Tensor  # [B] i64, first absolute position at which a stop id may be drawn
    stop_ids: Tensor  # [B, M] i64, padded with -1
    output_from: Tensor  # [B] i64, position of the request's first output token
    work: SamplingWork
    processors: LogitProcessors  # the engine's

    @property
    def needs_logits(self) -> bool:
        """Whether more is asked for than the column of the largest logit."""
        return self.work.sampled or self.processors.active(self.work)

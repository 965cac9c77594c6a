"""How the slots of a step draw their tokens, and which kinds of drawing a step can have. Shapes: spec/types.py."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SamplingWork:
    """What kinds of sampling a step has to do, known to the host: greedy requests alone launch none of it."""

    sampled: bool
    filtered: bool  # some request has top_k, top_p or min_p
    masked: bool  # some request has min_new_tokens


# What a step can be prepared for: greedy, sampled, and everything (which does the others' work too, at its price).
SAMPLING_WORK = (
    SamplingWork(False, False, False),
    SamplingWork(True, False, False),
    SamplingWork(True, True, True),
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
    work: SamplingWork

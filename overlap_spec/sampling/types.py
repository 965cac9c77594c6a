"""Which kinds of drawing tokens a step can have."""

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class SamplingWork:
    """What kinds of sampling a step has to do, known to the host: greedy requests alone launch none of it."""

    sampled: bool
    filtered: bool  # some request has top_k, top_p or min_p
    processed: bool  # some request's parameters change its logits
    outputs: bool = False  # some request asks for outputs beside its tokens
    of_target: bool = False  # some request asks for a stage of the target's rows alone

    def covers(self, other: "SamplingWork") -> bool:
        """Whether a step prepared for this does all that the other asks for."""
        return all(getattr(self, kind.name) or not getattr(other, kind.name) for kind in fields(other))


# What a step can be prepared for, cheapest first: each does the work of those that it covers, at its own price. A
# batch takes the first that covers all of its requests; every one is captured. They are kinds of stages and outputs,
# not single ones: a feature more adds no kind.
SAMPLING_WORK = (
    SamplingWork(False, False, False),  # greedy
    SamplingWork(True, False, False),  # sampled
    SamplingWork(False, False, False, of_target=True),  # guesses are drawn as in greedy ones
    SamplingWork(True, False, False, of_target=True),
    SamplingWork(True, False, True, of_target=True),  # processed
    SamplingWork(True, True, False),  # filtered: up to four more passes over the logits
    SamplingWork(True, True, True, of_target=True),  # both
    SamplingWork(True, False, True, outputs=True, of_target=True),
    SamplingWork(True, True, True, outputs=True, of_target=True),  # everything
)
GREEDY_WORK, EVERY_WORK = SAMPLING_WORK[0], SAMPLING_WORK[-1]


def cheapest_work(asked: Iterable[SamplingWork]) -> SamplingWork:
    """The first kind that does all of this. Of a large batch most are one object: each object is looked at once."""
    distinct = {id(work): work for work in asked}.values()
    return next(kind for kind in SAMPLING_WORK if all(map(kind.covers, distinct)))

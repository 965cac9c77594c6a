"""A draft that learns, whose head is changed beyond recognition all the time: tokens must stay plain decoding's."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from overlap_spec.features.adapt_draft import learner, scheduler
from overlap_spec.features.adapt_draft.learner import Learner


@dataclass
class Swaps:
    """How often heads took over, were taken back, and were trained."""

    taken: int = 0
    undone: int = 0
    trained: int = 0


def swap_all_the_time(patched: pytest.MonkeyPatch) -> Swaps:
    """Every judgement lets the copy take over; some are taken back. No order costs anything, on however slow a host."""
    found = Swaps()

    def counted(name: str, counter: str) -> None:
        whole: Callable[..., None] = getattr(Learner, name)

        def count(self: Learner, *given: object) -> None:
            setattr(found, counter, getattr(found, counter) + 1)
            whole(self, *given)

        patched.setattr(Learner, name, count)

    for name, counter in {"take_over": "taken", "go_back": "undone", "step": "trained"}.items():
        counted(name, counter)
    values = {"TAKES_OVER": 0.0, "JUDGED_EVERY": 1, "WATCHED": 6, "FELL": 1.0}
    values |= {"LEAST_SAMPLES": 2, "HELD_OUT": 2, "LEAST_ANSWER": 2}
    for name, value in values.items():
        patched.setattr(scheduler, name, value)
    patched.setattr(scheduler.Learning, "_spend", lambda *_: None)
    patched.setattr(learner, "RATE", 0.05)
    patched.setattr(learner, "WARM_UP", 1)
    return found

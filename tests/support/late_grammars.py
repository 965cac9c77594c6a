"""The grammars that a worker follows, for tests: where they are, and how to make them late."""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from overlap_spec.worker.executor import Executor

if TYPE_CHECKING:
    from overlap_spec.features.grammar.grammars import RequestGrammar
    from overlap_spec.features.grammar.step import GrammarSteps
    from overlap_spec.features.grammar.window_masks import HostWindow


def grammars_of(executor: Executor) -> "GrammarSteps":
    """What follows them."""
    from overlap_spec.features.grammar.step import GrammarSteps

    found = executor.hooks.by_name["grammar"]
    assert isinstance(found, GrammarSteps)
    return found


def delay_grammars(executor: Executor, seconds: float) -> None:
    """Let all grammars be followed in threads, and take so much longer."""
    steps = grammars_of(executor)
    masks = steps.grammars.masks

    def late(
        grammars: "Sequence[RequestGrammar]", windows: "Sequence[HostWindow]", memory: Tensor, places: Sequence[int]
    ) -> None:
        if threading.current_thread().name.startswith("grammar"):
            time.sleep(seconds)
        masks(grammars, windows, memory, places)

    steps.grammars.masks = late
    steps.slow.slow_s = steps.slow.timeout_s = -1.0

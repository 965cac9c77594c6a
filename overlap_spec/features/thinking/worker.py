"""The worker's part of reasoning: a budget is a row of each slot, which the one pass over the logits reads."""

from collections.abc import Iterable, Mapping

from overlap_spec_kernels import BUDGET_WIDTH
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.messages import ResetSlot
from overlap_spec.worker.build import Parts
from overlap_spec.worker.devices import pack_ints
from overlap_spec.worker.hooks import Needs, StepHook
from overlap_spec.worker.startup.geometry import LoadedModels

MARKER = (BUDGET_WIDTH - 4) // 2  # tokens of a marker, at most
NO_BUDGET = (-1, *[0] * (BUDGET_WIDTH - 1))


def attach(parts: Parts) -> StepHook:
    """Any request may have a budget."""
    return BudgetHook()


def needs(settings: Settings, models: LoadedModels) -> Needs:
    """A budget for each slot."""
    return Needs(slot_bytes=len(BudgetColumns.neutral))


class BudgetColumns:
    """A slot's budget, as `packed_budget` makes it."""

    width = BUDGET_WIDTH
    neutral = pack_ints(NO_BUDGET)

    def pack(self, reset: ResetSlot) -> bytes:
        if (found := reset.sampling.thinking) is None:
            return self.neutral
        return pack_ints(packed_budget(found.budget, found.is_open, found.opening, found.closing))

    def rules(self, columns: Tensor) -> Mapping[str, Tensor]:
        return {"budgets": columns}


class BudgetHook(StepHook):
    """There is nothing to do in a step."""

    columns = BudgetColumns()


def packed_budget(tokens: int, is_open: bool, opening: Iterable[int], closing: Iterable[int]) -> list[int]:
    """The row of a slot whose reasoning may take so many tokens. `is_open`: the output begins inside of it."""
    begins, ends = list(opening), list(closing)
    markers = [*begins, *[-1] * (MARKER - len(begins)), *ends, *[-1] * (MARKER - len(ends))]
    return [tokens, int(is_open), len(begins), len(ends), *markers]

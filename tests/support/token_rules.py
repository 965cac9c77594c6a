"""Penalties, lists of tokens and thinking budgets in an executor that is built without an engine's settings."""

from overlap_spec.features import is_there
from overlap_spec.worker.executor import Executor


def with_token_rules(executor: Executor) -> Executor:
    """The same, as those of the features that are there attach to an engine. Nothing has run yet."""
    slots, device = executor.slots, executor.device
    vocab_size = slots.processors.vocab_size
    if is_there("thinking"):
        from overlap_spec.features.thinking.worker import BudgetHook

        executor.hooks.add("thinking", BudgetHook())
    if is_there("penalties"):
        from overlap_spec.features.penalties.worker import ListSteps, SlotLists

        lists = SlotLists.allocate(len(slots.length), vocab_size, device.torch_device)
        executor.hooks.add("penalties", ListSteps(lists, device))
    slots.draw_through(slots.processors.stages, slots.outputs, executor.hooks.columns)
    return executor

"""Features: what the engine does beyond requests, steps and drafts, one folder each.

A feature attaches to a process of the ring by a module of that process's name, and sends what it declares:

    <name>/frontend.py     attach(parts) -> RequestHook
    <name>/scheduler.py    attach(parts) -> SchedulerHook
    <name>/worker.py       attach(parts) -> StepHook
    <name>/messages.py     EXTENSIONS: its messages, and the columns that it adds to those of the ring

`attach` returns None where the settings leave the feature out. The engine imports no feature: each process asks this
table once, at its start. A folder that is taken away is a feature that is not there; the engine runs without it.
"""

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from overlap_spec.messages import EXTENSIONS, carrying

# In the order in which they attach, which is the order of their hooks.
NAMES = ("thinking", "grammar", "audit", "draft_health", "log_probs", "recovery", "tracing")
FRONTEND, SCHEDULER, WORKER, MESSAGES = "frontend", "scheduler", "worker", "messages"


def modules(kind: str) -> list[ModuleType]:
    """The modules of this name of all features that are there, in the table's order."""
    found = []
    for name in NAMES:
        place = f"{__name__}.{name}"
        if importlib.util.find_spec(place) is not None and importlib.util.find_spec(f"{place}.{kind}") is not None:
            found.append(importlib.import_module(f"{place}.{kind}"))
    return found


def name_of(module: ModuleType) -> str:
    """The feature that a module is of."""
    return module.__name__.split(".")[-2]


def link(union: Any) -> Any:
    """The type of a link's decoder, which knows what the features send."""
    return carrying(union, (*EXTENSIONS, *(kind for module in modules(MESSAGES) for kind in module.EXTENSIONS)))

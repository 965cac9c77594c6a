"""overlap-spec: a single-node LLM engine built for speculative decoding that never waits.

Public names: Engine, EngineConfig, Client, SamplingParams, and what its fields hold: Grammar, GrammarKind,
LogProbParams, Reasoning, Speculative; and Terms. Every child process imports this package, so a public name is loaded
when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from overlap_spec.version import __version__

if TYPE_CHECKING:
    from overlap_spec.client import Client
    from overlap_spec.config import EngineConfig
    from overlap_spec.engine import Engine
    from overlap_spec.messages import Grammar, GrammarKind, LogProbParams, Reasoning, SamplingParams, Speculative, Terms

__all__ = [
    "Client",
    "Engine",
    "EngineConfig",
    "Grammar",
    "GrammarKind",
    "LogProbParams",
    "Reasoning",
    "SamplingParams",
    "Speculative",
    "Terms",
    "__version__",
]

_MODULES = {"Client": "overlap_spec.client", "Engine": "overlap_spec.engine", "EngineConfig": "overlap_spec.config"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "overlap_spec.messages")), name)

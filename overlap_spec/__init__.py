"""overlap-spec: a single-node LLM engine built for speculative decoding that never waits.

Public names: Engine, Client, SamplingParams, EngineConfig. Every child process imports this package, so a public name
is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from overlap_spec.version import __version__

if TYPE_CHECKING:
    from overlap_spec.client import Client
    from overlap_spec.config import EngineConfig
    from overlap_spec.engine import Engine
    from overlap_spec.messages import SamplingParams

__all__ = ["Client", "Engine", "EngineConfig", "SamplingParams", "__version__"]

_HOMES = {
    "Client": "overlap_spec.client",
    "Engine": "overlap_spec.engine",
    "EngineConfig": "overlap_spec.config",
    "SamplingParams": "overlap_spec.messages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

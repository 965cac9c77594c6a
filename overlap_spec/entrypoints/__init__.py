"""Entry points: how users reach the engine, one folder each. The engine imports none of them.

    http, openai, parsers            the server and OpenAI's API, which are one thing; what answers over HTTP needs them
    responses, anthropic, native, ui APIs beside it: each package has attach(parts) -> Api
    protection                       what bounds connections and bodies, beyond uvicorn
    otlp                             spans of requests
    cli, top, ray                    commands

A folder that is taken away is an entry point that is not there, and those that need it go with it. A flag of it that is
given is a ConfigError, a command a UsageError, a path a 404: each names it.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from overlap_spec.config import EngineConfig
from overlap_spec.config.flags import without_flags

SERVER = ("http", "openai", "parsers")
NEEDS = {
    **{name: tuple(other for other in SERVER if other != name) for name in SERVER},
    **dict.fromkeys(("responses", "anthropic", "native", "ui", "protection", "otlp", "cli"), SERVER),
    **dict.fromkeys(("top", "ray"), (*SERVER, "cli")),
}
NAMES = tuple(NEEDS)
BOUNDS = ("http_header_timeout", "http_body_timeout", "max_connections", "max_connections_per_address")
FLAGS: dict[str, Mapping[str, Any]] = {  # each with the value that leaves the entry point out
    "ui": {"disable_ui": True},
    "protection": {name: getattr(EngineConfig(), name) for name in BOUNDS},
    "otlp": {"otlp_traces_endpoint": None, "enable_trace": False},
}
PATHS = {  # of APIs
    "responses": ("/v1/responses",),
    "anthropic": ("/v1/messages", "/v1/messages/count_tokens"),
    "native": ("/generate",),
    "ui": ("/ui", "/ui/{name}"),
}


def is_there(name: str) -> bool:
    """Returns True if the entry point's folder exists, and those that it needs."""
    return all(importlib.util.find_spec(f"{__name__}.{each}") is not None for each in (name, *NEEDS[name]))


def absent() -> list[str]:
    """The entry points that are not there."""
    return [name for name in NAMES if not is_there(name)]


def find(name: str, module: str = "") -> ModuleType | None:
    """A module of an entry point, or its package; None if that is not there."""
    return importlib.import_module(f"{__name__}.{name}.{module}".rstrip(".")) if is_there(name) else None


def refusal(name: str) -> str:
    """Why something of an entry point cannot be had."""
    return f"is of the entry point {name!r}, which is not part of this installation"


def without_absent(config: EngineConfig) -> EngineConfig:
    """The same without what is not there. Raises: ConfigError naming a flag that is given of it."""
    return without_flags(config, {name: FLAGS.get(name, {}) for name in absent()}, "entry point")

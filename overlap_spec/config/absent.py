"""Flags of what can be taken away, and is: refused by name, and otherwise set so that it is left out."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from overlap_spec.config.flags import EngineConfig
from overlap_spec.errors import ConfigError


def without_flags(config: EngineConfig, absent: Mapping[str, Mapping[str, Any]], kind: str) -> EngineConfig:
    """The same without what is not there. `absent`: by name, its flags, each with the value that leaves it out.

    Raises: ConfigError naming a flag of something absent that is given. `kind`: a noun for the message.
    """
    defaults, off = EngineConfig(), dict[str, Any]()
    for name, flags in absent.items():
        for flag, value in flags.items():
            if getattr(config, flag) not in (getattr(defaults, flag), value):
                raise ConfigError(flag, f"is of the {kind} {name!r}, which is not part of this installation")
            off[flag] = value
    return replace(config, **off) if off else config

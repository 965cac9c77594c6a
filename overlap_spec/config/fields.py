"""Reads the fields of `EngineConfig`, or of another struct of flags, for flags, help and checks.

So a new field gets its flag, its help line and its range check without further code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from overlap_spec.config import EngineConfig
from overlap_spec.errors import ConfigError

Limited = inspect.IntType | inspect.FloatType
Flags = TypeVar("Flags", bound=msgspec.Struct)


@dataclass(frozen=True)
class ConfigField:
    """One field. `wanted`: a description of its valid values; `many`: it takes one or more of them."""

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    wanted: str
    choices: tuple[str, ...]
    default: object
    description: str
    many: bool = False

    def parse(self, text: str | list[str]) -> object:
        """Convert one or several command-line words to this field's type. Raises: ConfigError."""
        try:
            return self.kind(text) if isinstance(text, str) else tuple(self.kind(word) for word in text)
        except ValueError:
            raise ConfigError(self.name, f"must be {self.wanted}, got {text!r}") from None


def config_fields(flags: type[msgspec.Struct] = EngineConfig) -> tuple[ConfigField, ...]:
    """Every field of EngineConfig, or of other `flags`, in its order."""
    struct = cast(inspect.StructType, inspect.type_info(flags))
    return tuple(_field(field) for field in struct.fields)


def check_config(config: EngineConfig) -> EngineConfig:
    """Check types and ranges, which msgspec does not do for a struct built in Python.

    Raises: ConfigError naming the flag.
    """
    return config_from(msgspec.structs.asdict(config))


def config_from(values: Mapping[str, Any]) -> EngineConfig:
    """Build a config; missing fields keep their defaults. Raises: ConfigError naming the flag."""
    return flags_from(values, EngineConfig)


def flags_from(values: Mapping[str, Any], flags: type[Flags]) -> Flags:
    """Build a struct of flags, as `config_from` does."""
    try:
        return msgspec.convert(values, flags)
    except msgspec.ValidationError:
        _raise_for_field(values, flags)
        raise


def _raise_for_field(values: Mapping[str, Any], flags: type[msgspec.Struct]) -> None:
    for field in config_fields(flags):
        if field.name in values:
            try:
                msgspec.convert({field.name: values[field.name]}, flags)
            except msgspec.ValidationError:
                raise ConfigError(field.name, f"must be {field.wanted}, got {values[field.name]!r}") from None


def _field(field: inspect.Field) -> ConfigField:
    plain, description, named = _unwrap(field.type)
    if named:
        wanted = f"one of {', '.join(named)}" if len(named) > 1 else named[0]
        return ConfigField(field.name, str, wanted, named, field.default, description)
    if not isinstance(plain, inspect.VarTupleType):
        kind, wanted, choices = _describe(plain)
        return ConfigField(field.name, kind, wanted, choices, field.default, description)
    item, _, named = _unwrap(plain.item_type)
    kind, each, choices = _describe(item)
    wanted = f"a list, each {named[0] if named else each}"
    return ConfigField(field.name, kind, wanted, choices, field.default, description, many=True)


def _unwrap(declared: inspect.Type) -> tuple[inspect.Type, str, tuple[str, ...]]:
    """Remove description, choices given by a pattern, and `| None`, in any order of nesting."""
    description, choices = "", ()
    while True:
        if isinstance(declared, inspect.Metadata):
            description = (declared.extra_json_schema or {}).get("description", description)
            choices = (declared.extra or {}).get("choices", choices)
            declared = declared.type
        elif isinstance(declared, inspect.UnionType):
            (declared,) = (part for part in declared.types if not isinstance(part, inspect.NoneType))
        else:
            return declared, description, choices


def _describe(plain: inspect.Type) -> tuple[type[str] | type[int] | type[float] | type[bool], str, tuple[str, ...]]:
    match plain:
        case inspect.BoolType():
            return bool, "true or false", ()
        case inspect.LiteralType():
            choices = tuple(str(value) for value in plain.values)
            return str, f"one of {', '.join(choices)}", choices
        case inspect.IntType():
            return int, f"a whole number{_limits(plain)}", ()
        case inspect.FloatType():
            return float, f"a number{_limits(plain)}", ()
        case inspect.StrType():
            return str, "text that is not empty" if plain.min_length else "text", ()
        case _:
            raise TypeError(f"a flag cannot be made of {plain}")


def _limits(number: Limited) -> str:
    words = (("at least", number.ge), ("above", number.gt), ("at most", number.le), ("below", number.lt))
    said = [f"{word} {limit}" for word, limit in words if limit is not None]
    return " " + " and ".join(said) if said else ""

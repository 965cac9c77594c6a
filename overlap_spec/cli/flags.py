"""The engine's flags, made from EngineConfig's fields: `--page-size` is `page_size`."""

import argparse

from overlap_spec.cli.refused_flags import add_refused_flags
from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import ConfigField, config_fields, config_from
from overlap_spec.config.speculation import SpeculationFlags
from overlap_spec.errors import ConfigError

ALIASES = {
    "model_path": ("--model",),
    "mem_fraction_static": ("--mem-fraction",),
    "tp_size": ("--tp", "--tensor-parallel-size"),
    "speculative_draft_model_path": ("--speculative-draft-model",),
    "speculative_ngram_branch_length": ("--speculative-ngram-max-trie-depth",),
}
METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT"}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field. A flag that is not given leaves no trace, so the field keeps its default."""
    engine, speculation = parser.add_argument_group("engine"), parser.add_argument_group("speculation")
    add_refused_flags(parser)
    for field in config_fields():
        group = speculation if field.name in SpeculationFlags.__struct_fields__ else engine
        names = (flag_name(field.name), *ALIASES.get(field.name, ()))
        if field.kind is bool:
            group.add_argument(
                *names, dest=field.name, action="store_true", default=argparse.SUPPRESS, help=_help(field)
            )
        else:
            group.add_argument(
                *names,
                dest=field.name,
                default=argparse.SUPPRESS,
                metavar=_metavar(field),
                nargs="+" if field.many else None,
                help=_help(field),
            )


def engine_config(arguments: argparse.Namespace, **defaults: object) -> EngineConfig:
    """The config that a command line asks for; `defaults` are the command's own. Raises: ConfigError."""
    values = dict(defaults)
    for field in config_fields():
        if field.name in arguments:
            given = getattr(arguments, field.name)
            values[field.name] = field.parse(given) if isinstance(given, str | list) else given
    return config_from(values)


def refuse_bench_flags(config: EngineConfig) -> None:
    """Answers for people are never made up. Raises: ConfigError."""
    if config.speculative_simulate_acc_len is not None:
        raise ConfigError(
            "speculative_simulate_acc_len", "makes acceptance synthetic, and text meaningless: it goes with bench only"
        )


def flag_name(field: str) -> str:
    """The flag of a field."""
    return f"--{field.replace('_', '-')}"


def _metavar(field: ConfigField) -> str:
    return "{" + ",".join(field.choices) + "}" if field.choices else METAVARS[field.kind]


def _help(field: ConfigField) -> str:
    text = field.description
    if field.kind is not bool and field.default is not None and "default" not in text:
        text += f" (default: {field.default})"
    return text.replace("%", "%%")

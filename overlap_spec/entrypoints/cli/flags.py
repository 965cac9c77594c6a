"""The engine's flags, made from EngineConfig's fields: `--page-size` is `page_size`."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import ConfigField, config_fields, config_from
from overlap_spec.entrypoints import without_absent
from overlap_spec.entrypoints.cli.flag_groups import FIRST, GROUPS
from overlap_spec.entrypoints.cli.foreign_flags import GRANTED
from overlap_spec.entrypoints.cli.parser import UsageError
from overlap_spec.errors import ConfigError

ALIASES = {
    "model_path": ("--model",),
    "tokenizer_path": ("--tokenizer",),
    "context_length": ("--max-model-len",),
    "max_running_requests": ("--max-num-seqs",),
    "chunked_prefill_size": ("--max-num-batched-tokens",),
    "page_size": ("--block-size",),
    "disable_cuda_graph": ("--enforce-eager",),
    "mem_fraction_static": ("--mem-fraction",),
    "tp_size": ("--tp", "--tensor-parallel-size"),
    "speculative_draft_model_path": ("--speculative-draft-model",),
    "speculative_ngram_branch_length": ("--speculative-ngram-max-trie-depth",),
}
JOINED = ("served_model_name",)  # several words become one value
METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT"}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field, by subject. A flag that is not given leaves no trace, so the field keeps its default."""
    _add_granted_flags(parser)
    fields = {field.name: field for field in config_fields()}
    for title, names in {"most used": FIRST, **GROUPS}.items():
        group = parser.add_argument_group(title)
        for name in names:
            if name in fields:  # not if it was among the most used
                add_flag(group, fields.pop(name))
    assert not fields, f"in no group of flags: {sorted(fields)}"


def add_flag(group: argparse._ArgumentGroup, field: ConfigField) -> None:
    """The flag of one field."""
    names = (flag_name(field.name), *ALIASES.get(field.name, ()))
    if field.kind is bool:
        action = "store_true" if field.default is False else argparse.BooleanOptionalAction
        group.add_argument(*names, dest=field.name, action=action, default=argparse.SUPPRESS, help=_help(field))
        return
    several = field.many or field.name in JOINED
    group.add_argument(
        *names,
        dest=field.name,
        default=argparse.SUPPRESS,
        metavar=_metavar(field),
        nargs="+" if several else None,
        help=_help(field),
    )


def engine_config(arguments: argparse.Namespace, **defaults: object) -> EngineConfig:
    """The config that a command line asks for; `defaults` are the command's own. Raises: ConfigError."""
    return without_absent(config_from({**defaults, **given_values(arguments, config_fields())}))


def given_values(arguments: argparse.Namespace, fields: Sequence[ConfigField]) -> dict[str, object]:
    """By name, the values of those fields whose flags were given. Raises: ConfigError."""
    values: dict[str, object] = {}
    for field in fields:
        if field.name in arguments:
            given = getattr(arguments, field.name)
            if field.name in JOINED:
                given = ",".join(given)
            values[field.name] = field.parse(given) if isinstance(given, str | list) else given
    return values


def refuse_bench_flags(config: EngineConfig) -> None:
    """Refuse flags that simulate acceptance: their answers are meaningless. Raises: ConfigError."""
    if config.speculative_simulate_acc_len is not None:
        raise ConfigError(
            "speculative_simulate_acc_len", "makes acceptance synthetic, and text meaningless: it goes with bench only"
        )


def refuse_flags(arguments: argparse.Namespace, fields: Iterable[str], why: str) -> None:
    """Refuse flags that a command would ignore. Raises: UsageError naming the first that was given."""
    for field in fields:
        if field in arguments:
            raise UsageError(f"{flag_name(field)}: {why}; leave it out")


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


class _Grant(argparse.Action):
    """Keeps the note of a flag whose effect is always there. Raises: UsageError for another value of it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = self.option_strings[0]
        granted = GRANTED[flag]
        if granted.values and values not in granted.values:
            raise UsageError(f"{flag}: {granted.note}; leave it out, or give {' or '.join(granted.values)}")
        namespace.granted = [*getattr(namespace, "granted", ()), f"{flag} changes nothing: {granted.note}"]


def _add_granted_flags(parser: argparse.ArgumentParser) -> None:
    for flag, granted in GRANTED.items():
        parser.add_argument(
            flag,
            nargs=None if granted.values else 0,
            action=_Grant,
            dest="granted",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )

"""Tables of flags, read from what parses them: `EngineConfig`'s fields, `bench`'s parser, the refused flags, `resolve`.

Every field of the engine is in exactly one table; one that is in none, or in two, is an error.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from overlap_spec.config import PLAIN, SMOLLM2_SPEC, EngineConfig, Machine, ModelFiles, SpecSettings
from overlap_spec.config.fields import ConfigField, config_fields
from overlap_spec.config.resolve import resolve
from overlap_spec.entrypoints.cli import bench, chat, check, verify
from overlap_spec.entrypoints.cli.flags import ALIASES, GRANTED, GROUPS, Parser, flag_name, reasons
from overlap_spec.entrypoints.ray import command as serve_ray

Rows = Sequence[Sequence[str]]


def _engine(group: str) -> str:
    fields = {found.name: found for found in config_fields()}
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(fields), f"in no table, or in two: {set(grouped) ^ set(fields)}"
    rows = [_engine_row(fields[name]) for name in GROUPS[group]]
    return _table(("flag", "value", "default", "what it does"), rows)


def _engine_row(found: ConfigField) -> tuple[str, ...]:
    names = " ".join(f"`{name}`" for name in (flag_name(found.name), *ALIASES.get(found.name, ())))
    default = "" if found.default is None or found.kind is bool else f"`{found.default}`"
    wanted = found.wanted.removesuffix(" that is not empty").removeprefix("one of ")
    return names, "" if found.kind is bool else wanted, default, found.description


def _others(module: ModuleType) -> str:
    """The flags of a command that are not the engine's."""
    parser: argparse.ArgumentParser = Parser()
    module.add_arguments(parser)
    of_engine = {flag_name(found.name) for found in config_fields()} | set(GRANTED) | {"--help"}
    rows = [
        (f"`{action.option_strings[-1]}`", f"`{action.metavar}`" if action.metavar else "", action.help or "")
        for action in parser._actions
        if action.option_strings and not of_engine & set(action.option_strings)
    ]
    return _table(("flag", "value", "what it does"), rows)


def _refused() -> str:
    rows = [(" ".join(f"`{flag}`" for flag in flags), why) for why, flags in reasons().items()]
    return _table(("flag", "why, and what to do instead"), rows)


def _granted() -> str:
    rows = [(f"`{flag}`", " ".join(granted.values), granted.note) for flag, granted in GRANTED.items()]
    return _table(("flag", "value", "what it asks for"), rows)


@dataclass(frozen=True)
class Case:
    """A model and a method without the three numbers. `architecture`: "" for the alias `smollm2`."""

    model: str
    architecture: str
    method: str | None
    flags: dict[str, object] = field(default_factory=dict)


LLAMA, QWEN = "LlamaForCausalLM", "Qwen2ForCausalLM"
GIVEN: dict[str, object] = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
OF_LLAMA, OF_OTHERS = "a Llama", "another architecture"
CASES = (
    Case("`smollm2`", "", None),
    Case("`smollm2`", "", None, GIVEN),
    Case("`smollm2`", "", "EAGLE"),
    Case("`smollm2`", "", "STANDALONE"),
    Case(OF_LLAMA, LLAMA, None),
    Case(OF_LLAMA, LLAMA, "EAGLE3"),
    Case(OF_LLAMA, LLAMA, "EAGLE3", {"speculative_use_rejection_sampling": True}),
    Case(OF_LLAMA, LLAMA, "STANDALONE"),
    Case(OF_OTHERS, QWEN, "EAGLE3"),
    Case(OF_OTHERS, QWEN, "EAGLE3", GIVEN),
    Case(OF_OTHERS, QWEN, "EAGLE3", GIVEN | {"speculative_adaptive": True}),
    Case("any", QWEN, "NGRAM"),
    Case("any", QWEN, "NGRAM", {"speculative_num_draft_tokens": 8}),
    Case("any", QWEN, "NGRAM", {"speculative_ngram_max_bfs_breadth": 1}),
    Case("any", QWEN, "MODULE:METHOD"),
)
GPU = Machine(num_cores=16, has_cuda=True)
NEEDS_DRAFT = ("EAGLE", "EAGLE3", "STANDALONE")


def _defaults() -> str:
    rows = [(case.model, f"`{case.method}`" if case.method else "", _asked(case), *_settled(case)) for case in CASES]
    return _table(("model", "method", "flags", "(steps, topk, draft tokens)", "width of a step", "why"), rows)


def _asked(case: Case) -> str:
    return " ".join(
        f"`{flag_name(name)}`" if value is True else f"`{flag_name(name)} {value}`"
        for name, value in case.flags.items()
    )


def _settled(case: Case) -> tuple[str, str, str]:
    config: dict[str, object] = {"architectures": [case.architecture]} if case.architecture else {}
    files = ModelFiles(
        weights="w",
        config=config,
        tokenizer_dir="t",
        eos_token_ids=(),
        context_length=512,
        vocab_size=128,
        preset_draft=None if case.architecture else "head",
        preset_spec=None if case.architecture else SMOLLM2_SPEC,
    )
    method = "own.module:METHOD" if case.method == "MODULE:METHOD" else case.method
    draft = {"speculative_draft_model_path": "d"} if method in NEEDS_DRAFT else {}
    asked: dict[str, Any] = {"speculative_algorithm": method, **draft, **case.flags}
    settings, _ = resolve(EngineConfig(**asked), files, GPU)
    spec = settings.spec
    if spec.method == PLAIN:
        return "", "1", "plain decoding"
    if settings.scheduler.keeps_width:
        narrower = ", or 1 where nothing matches" if spec.narrower else ""
        return _numbers(spec), f"as given{narrower}", spec.numbers_from
    return _numbers(spec), "as wide as pays", spec.numbers_from


def _numbers(spec: SpecSettings) -> str:
    return f"({spec.num_steps}, {spec.topk}, {spec.width})"


def _table(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", ", ") for cell in line) + " |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    **{group: functools.partial(_engine, group) for group in GROUPS},
    "bench": functools.partial(_others, bench),
    "chat": functools.partial(_others, chat),
    "serve-ray": functools.partial(_others, serve_ray),
    "verify": functools.partial(_others, verify),
    "check": functools.partial(_others, check),
    "refused": _refused,
    "granted": _granted,
    "defaults": _defaults,
}

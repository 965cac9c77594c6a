"""The methods that `bench methods` compares: records of flags, read from `data/methods.json` or a user's file.

The engine itself reports whether a record can run. The tables of a report have every figure, or a line for each method.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from overlap_spec import hub
from overlap_spec.config import PLAIN, EngineConfig, Settings
from overlap_spec.config.fields import check_config, config_from
from overlap_spec.config.resolve import resolve, without_speculation
from overlap_spec.errors import ConfigError, OverlapSpecError
from overlap_spec.runtime import machine

SHIPPED = Path(__file__).parent.parent / "data" / "methods.json"


class MethodRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the table. Missing numbers are the method's defaults. `adaptive`: steps may be narrower.

    `learns`: the method drafts from its earlier answers, so it must not meet a prompt twice. `copied`: guesses of
    n-grams beside a chain.
    """

    label: str
    algorithm: str
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    token_map: bool = False
    adaptive: bool = False
    learns: bool = False
    copied: int | None = None


PLAIN_RECORD = MethodRecord("plain", PLAIN)  # always measured first, as the others' baseline


@dataclass(frozen=True)
class Drafts:
    """The user's draft models by algorithm (directories or hub ids), and token map."""

    paths: Mapping[str, str]
    token_map: str | None = None


class Skipped(OverlapSpecError):
    """A record does not run because a draft or file that it needs was not given. The message names the flag."""


def read_method_records(path: str | None) -> tuple[MethodRecord, ...]:
    """The table in the JSON file `path`; None: the package's own. Raises: ConfigError naming --methods."""
    try:
        records = msgspec.json.decode(Path(path or SHIPPED).read_bytes(), type=tuple[MethodRecord, ...])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError("methods", f"{path} is no table of methods: {error}") from None
    labels = [PLAIN_RECORD.label, *(record.label for record in records)]
    if len(set(labels)) < len(labels):
        raise ConfigError("methods", f"{path}: labels must differ from each other and from {PLAIN_RECORD.label!r}")
    return records


def chosen(records: Sequence[MethodRecord], only: Sequence[str], drafts: Drafts) -> tuple[MethodRecord, ...]:
    """The records of the algorithms in `only`; all records if it is empty.

    Raises: ConfigError for a name that no record has, and for a draft or a map that no record would use.
    """
    _check_names("only", only, records)
    rows = tuple(record for record in records if not only or record.algorithm in only)
    _check_names("draft", drafts.paths, rows)
    if drafts.token_map is not None and not any(row.token_map for row in rows):
        raise ConfigError("token_map", "no row that is measured uses one; leave it out")
    return rows


def _check_names(flag: str, names: Iterable[str], rows: Sequence[MethodRecord]) -> None:
    known = sorted({row.algorithm for row in rows})
    for name in names:
        if name not in known:
            raise ConfigError(flag, f"no row that is measured is of {name!r}; there are {', '.join(known)}")


def config_of(config: EngineConfig, record: MethodRecord, drafts: Drafts) -> EngineConfig:
    """The same engine with the record's method. Raises: ConfigError naming the flag, Skipped."""
    if record.algorithm == PLAIN:
        return without_speculation(config)
    if record.token_map and drafts.token_map is None:
        raise Skipped("needs --token-map FILE")
    return config_from(
        asdict(without_speculation(config))
        | {
            "speculative_algorithm": record.algorithm,
            "speculative_draft_model_path": drafts.paths.get(record.algorithm),
            "speculative_num_steps": record.num_steps,
            "speculative_eagle_topk": record.topk,
            "speculative_num_draft_tokens": record.num_draft_tokens,
            "speculative_token_map": drafts.token_map if record.token_map else None,
            "speculative_adaptive": record.adaptive,
            "speculative_fuse_ngram": record.copied,
        }
    )


def check_record(config: EngineConfig, record: MethodRecord, drafts: Drafts) -> Settings:
    """The settings of the record's engine, resolved before anything starts. Raises: ConfigError, Skipped."""
    flag = f"--draft {record.algorithm}=PATH"
    lacks_draft = record.algorithm not in drafts.paths
    try:
        files = hub.resolve_model(check_config(config))
        settings, _ = resolve(config, files, machine.inspect())
    except ConfigError as error:
        if lacks_draft and error.field == "speculative_draft_model_path":
            raise Skipped(f"needs {flag}") from None
        raise
    if lacks_draft and settings.spec.method != record.algorithm:
        raise Skipped(f"needs {flag}; without it, it is {settings.spec.method}, which has a row of its own")
    return settings


def in_force(record: MethodRecord, settings: Settings) -> MethodRecord:
    """The record with the numbers that the engine resolved."""
    spec = settings.spec
    if spec.width == 1:
        return record
    return replace(record, num_steps=spec.num_steps, topk=spec.topk, num_draft_tokens=spec.width)


Report = dict[str, Any]
Rows = list[list[Any]]

BUSY = 2.0  # load average relative to that of one engine: above it, other processes used the machine

FULL = [
    "method",
    "prompts",
    "batch",
    "accept length",
    "step, ms",
    "tok/s",
    "against plain",
    "same answers",
    "weights, MiB",
    "KV, bytes a token",
]


def full_rows(report: Report) -> Rows:
    """One row for each method, set of prompts and batch size."""
    return [
        [
            name_of(entry),
            figures["prompts"],
            figures["batch"],
            figures["accept_length"],
            figures["step_ms"],
            figures["tokens_per_second"],
            against_plain(figures["ratio"]),
            f"{figures['identical']:.0%}",
            *memory_of(entry),
        ]
        for entry in report["methods"]
        for figures in _in_order(entry, report)
    ]


def _in_order(entry: Report, report: Report) -> list[Report]:
    """An entry's rows by prompts, then by batch size. A method that learns is measured in another order."""
    names = report["workload"]["prompts"].split(",")
    return sorted(entry.get("figures", []), key=lambda row: (names.index(row["prompts"]), row["batch"]))


def notes(report: Report) -> list[str]:
    """A sentence for each method that was not measured, or not to its end, and one if others used the machine."""
    sentences = [
        f"{name_of(entry)}: {entry['status']}: {entry['reason']}"
        for entry in report["methods"]
        if entry["status"] != "ran"
    ]
    load, threads = max(entry["load_average"] for entry in report["methods"]), report["run"]["num_threads"]
    if load > BUSY * threads:
        sentences.append(
            f"others used this machine meanwhile (load average {load}, {threads} threads): times say little"
        )
    return sentences


def name_of(entry: Report) -> str:
    """A method with its numbers, as far as they are known."""
    flags = entry["flags"]
    numbers = [flags[name] for name in ("num_steps", "topk", "num_draft_tokens")]
    return f"{entry['label']} ({', '.join(map(str, numbers))})" if None not in numbers else str(entry["label"])


def against_plain(ratio: float) -> str:
    """The ratio to plain decoding's tok/s, marked if it is below 1."""
    return f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}** slower"


def memory_of(entry: Report) -> list[str]:
    """Target's and draft's weights in MiB, and bytes per token in their KV caches."""
    memory = entry["memory"]
    return [
        _split(memory["weights_mib"], memory["draft_weights_mib"]),
        _split(memory["kv_bytes_per_token"], memory["draft_kv_bytes_per_token"]),
    ]


def _split(both: int, draft: int) -> str:
    return f"{both - draft} + {draft}" if draft else str(both)

"""The methods that `bench methods` compares: records of flags, read from `data/methods.json` or a user's file.

The engine itself reports whether a record can run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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

    `learns`: the method drafts from its earlier answers, so it must not meet a prompt twice.
    """

    label: str
    algorithm: str
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    token_map: bool = False
    adaptive: bool = False
    learns: bool = False


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

"""The engine's flags, made from EngineConfig's fields: `--page-size` is `page_size`.

The parser raises instead of exiting and never guesses an abbreviated flag. `--help` and the documents have flags by
subject, each in exactly one group. Flags of SGLang's and vLLM's servers that are not the engine's are taken where what
they ask for is always so, and refused where it cannot be had.
"""

import argparse
import difflib
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import ConfigField, config_fields, config_from
from overlap_spec.config.keys import can_be_written
from overlap_spec.entrypoints import without_absent
from overlap_spec.errors import ConfigError, OverlapSpecError

FIRST = (  # in `--help`, before the groups
    *("model_path", "host", "port", "api_key", "served_model_name", "context_length", "mem_fraction_static"),
    *("max_running_requests", "speculative_algorithm", "speculative_draft_model_path"),
)
DRAFT = (
    *("speculative_draft_model_path", "speculative_draft_model_revision", "speculative_draft_load_format"),
    *("speculative_draft_model_quantization", "speculative_token_map", "speculative_draft_window_size"),
    *("speculative_dflash_block_size", "speculative_dspark_block_size"),
    *("speculative_draft_attention_backend", "speculative_attention_mode"),
    *("speculative_moe_runner_backend", "speculative_moe_a2a_backend", "speculative_draft_tp_size"),
)
VERIFICATION = (
    *("speculative_use_rejection_sampling", "speculative_accept_threshold_single"),
    *("speculative_accept_threshold_acc", "speculative_simulate_acc_len"),
)
GROUPS: dict[str, tuple[str, ...]] = {
    "model": (
        *("model_path", "revision", "tokenizer_path", "load_format", "trust_remote_code", "served_model_name"),
        *("dtype", "quantization", "device", "tp_size", "context_length", "skip_tokenizer_init", "logit_processor"),
        *("feature", "enable_deterministic_inference"),
    ),
    "server": (
        *("host", "port", "api_key", "api_key_file", "admin_api_key", "isolate_clients", "shared_prefix"),
        *("sampling_defaults", "chat_template"),
        "trust_request_chat_template",
        *("tool_call_parser", "reasoning_parser", "cors_allow_origins", "allowed_hosts", "disable_ui", "zmq_endpoint"),
        "random_seed",
        *("http_header_timeout", "http_body_timeout", "max_connections", "max_connections_per_address"),
        *("recover", "max_recoveries", "watchdog_timeout", "drain_timeout", "log_level", "log_level_http"),
        *("otlp_traces_endpoint", "enable_trace"),
    ),
    "memory": (
        *("mem_fraction_static", "max_total_tokens", "max_running_requests", "chunked_prefill_size", "page_size"),
        "kv_cache_dtype",
        *("disable_radix_cache", "disable_overlap_schedule", "max_gap_ms", "enable_mixed_chunk"),
        *("mamba_ssm_dtype", "max_mamba_cache_size", "mamba_full_memory_ratio", "mamba_track_interval"),
        "mamba_radix_cache_strategy",
        *("schedule_policy",),
        *("max_queued_requests", "request_timeout", "first_token_timeout"),
    ),
    "graphs": (
        *("attention_backend", "disable_cuda_graph", "cuda_graph_max_bs", "cuda_graph_bs", "enable_torch_compile"),
        *("torch_compile_max_bs", "moe_runner_backend", "moe_a2a_backend"),
    ),
    "speculation": (
        *("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
        *("speculative_adaptive", "speculative_adaptive_config", "enable_multi_layer_eagle", "speculative_fuse_ngram"),
    ),
    "draft": DRAFT,
    "ngram": tuple(found.name for found in config_fields() if found.name.startswith("speculative_ngram_")),
    "verification": VERIFICATION,
    "audit": ("audit_rate", "audit_action", "audit_file"),
    "adapt": ("adapt_draft", "adapt_share", "adapt_save"),
}
ONLY_SERVED = (  # read by the HTTP server alone, which `chat`, `verify` and most of `bench` do not start
    *("host", "port", "served_model_name", "tool_call_parser", "cors_allow_origins", "disable_ui"),
    *("allowed_hosts", "log_level_http"),
    *("http_header_timeout", "http_body_timeout", "max_connections", "max_connections_per_address"),
    *("otlp_traces_endpoint", "enable_trace"),
)


@dataclass(frozen=True)
class Granted:
    """A flag whose effect is always there. `values`: the only ones it may have; none: it takes no value."""

    note: str
    values: tuple[str, ...] = ()


GRANTED = {
    "--enable-metrics": Granted("figures are always at /metrics"),
    "--enable-cache-report": Granted("usage always counts cached tokens"),
    "--enable-prompt-tokens-details": Granted("usage always counts cached tokens"),
    "--enable-prefix-caching": Granted("the prefix cache is on unless --disable-radix-cache is given"),
    "--enable-chunked-prefill": Granted("long prompts are always computed in chunks"),
    "--async-scheduling": Granted("steps overlap unless --disable-overlap-schedule is given"),
    "--sleep-on-idle": Granted("an idle engine always sleeps"),
    "--enable-auto-tool-choice": Granted("tool calls are read unless --tool-call-parser none is given"),
    "--enable-request-id-headers": Granted("answers always have x-request-id"),
    "--tokenizer-mode": Granted("there is one tokenizer", ("auto", "hf")),
    "--scheduling-policy": Granted("clients take turns, each one's requests in the order of arrival", ("fcfs",)),
    "--grammar-backend": Granted("grammars are llguidance's", ("llguidance", "guidance", "auto")),
    "--generation-config": Granted("the model's, unless --sampling-defaults openai is given", ("auto",)),
}


def instead_of(flag: str) -> str | None:
    """Why a flag of another server is refused, and what to do; None if it is unknown."""
    return _refused().get(flag)


def reasons() -> dict[str, list[str]]:
    """Every reason, and the flags that it answers."""
    found: dict[str, list[str]] = {}
    for flag, why in sorted(_refused().items()):
        found.setdefault(why, []).append(flag)
    return found


@functools.cache
def _refused() -> dict[str, str]:
    """Flag -> why. It is read when a flag is met that is not the engine's: a start needs none of this."""
    text = resources.files("overlap_spec").joinpath("data/foreign_flags.json").read_text()
    return {flag: why for row in json.loads(text) for why, flags in _answers(row) for flag in flags.split()}


def _answers(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """One answer to all flags of a row; or, where it has flags by what to use instead, one for each of those."""
    instead, flags = row["instead"], row["flags"]
    if isinstance(flags, str):
        yield instead, flags
    else:
        yield from ((instead.format(own), others) for own, others in flags.items())


class UsageError(OverlapSpecError):
    """The command line cannot be understood."""


def result_file(path: str) -> str:
    """A file for the end of a run, looked at before the run. Raises: argparse.ArgumentTypeError."""
    if not can_be_written(Path(path)):
        raise argparse.ArgumentTypeError(f"no file can be written at {path!r}")
    return path


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises: UsageError."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise UsageError(self._explain(unknown[0], getattr(parsed, "command", None)))
        return parsed

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def _explain(self, word: str, command: str | None) -> str:
        if not word.startswith("-"):
            return f"unknown argument {word!r}"
        flag = word.partition("=")[0]
        if instead := instead_of(flag):
            return f"{flag}: {instead}"
        near = difflib.get_close_matches(flag, self._flags(command), n=1)
        return f"unknown flag {flag}" + (f": did you mean {near[0]}?" if near else "")

    def _flags(self, command: str | None) -> list[str]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                return list(action.choices[command]._option_string_actions)
        return list(self._option_string_actions)


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

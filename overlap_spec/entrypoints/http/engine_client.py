"""The engine as the HTTP server sees it: a client, facts to print, and the engine's health.

`EngineClient` is the part of `overlap_spec.Client` that is used; a test's fake has the same shape.
"""

import hashlib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
from msgspec import UNSET, UnsetType

from overlap_spec.client.log_probs import TokenLogProb
from overlap_spec.config import ApiKeys, EngineConfig, HttpLimits, SamplingDefaults, ServerSettings, Settings
from overlap_spec.config.resolve import settled_flags
from overlap_spec.entrypoints.http.auth import HostRules, host_rules
from overlap_spec.entrypoints.parsers.formats import CallFormat, ReasoningFormat, call_format, reasoning_format
from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import (
    AuditReport,
    ChatPrompt,
    EngineFacts,
    EngineHealth,
    Finish,
    Generate,
    Phases,
    Record,
    Stats,
    TextPrompt,
    Usage,
    Verified,
)
from overlap_spec.version import __version__

# It is called before every request, so it must not wait.
HealthOf = Callable[[], EngineHealth]

# What the engine's processes did in the last seconds; none where they do not record.
Watch = Callable[[], list[Record]]

MAX_BODY_BYTES = 8 << 20  # about two million tokens of text; decoding it stalls the loop for some 20 ms


class DeltaLike(Protocol):
    """What one step added to a request. A delta whose `finish` is set is the last one."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def finish(self) -> Finish | None: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def verified(self) -> Verified | None: ...
    @property
    def log_probs(self) -> Sequence[TokenLogProb]: ...
    @property
    def prompt_log_probs(self) -> Sequence[TokenLogProb]: ...
    @property
    def phases(self) -> Phases | None: ...


class RequestsLike(Protocol):
    """Requests that one reader follows (`client/calls.py`). Leaving the block ends those that still run."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *error: object) -> None: ...
    async def start(self, requests: Sequence[Generate]) -> None: ...
    async def take(self) -> Sequence[tuple[str, DeltaLike | OverlapSpecError]]: ...


class EngineClient(Protocol):
    """The engine, as the server sees it.

    Errors: RequestError, Overloaded, RequestTimeout, RequestAborted, RequestFailed, ActorDied.
    """

    def together(self) -> RequestsLike: ...
    async def cancel(self, request_id: str, everyone: bool = False, of_key: str | None = None) -> None: ...
    async def tokenize(
        self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool = True, owner: str = ""
    ) -> list[int]: ...
    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False, owner: str = "") -> str: ...
    async def flush_cache(self) -> bool: ...
    async def update_draft(self, path: str, load_format: str = "auto") -> None: ...
    async def stats(self) -> Stats: ...
    async def audit(self) -> AuditReport: ...


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the endpoints print, settled at start. `settings` and `facts` are for `/server_info`.

    `facts`: called when they are asked for, since processes that are started again report others.
    """

    model_name: str
    model_path: str
    tokenizer_path: str | None
    max_model_len: int
    max_running_requests: int
    version: str
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    skip_tokenizer_init: bool = False
    keys: ApiKeys = ApiKeys()
    aliases: tuple[str, ...] = ()  # further names of the model
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    settings: dict[str, Any] = {}
    facts: Callable[[], dict[str, Any]] = dict
    fingerprint: str | UnsetType = UNSET  # of `bits_depend_on`, where replies have it
    max_body_bytes: int = MAX_BODY_BYTES
    num_steps: int = 0  # guesses in a row that a step can verify; of a tree, levels
    call_format: CallFormat | None = None  # None: tool calls are not read
    reasoning_format: ReasoningFormat | None = None
    cors_allow_origins: tuple[str, ...] = ()
    hosts: HostRules | None = None  # by which names the server may be called; None: by any
    http: HttpLimits = HttpLimits()
    ui: bool = True  # the page at /ui is served
    method: str = ""
    max_queued_requests: int = 0
    ranks: int = 1  # that share each layer


def server_info(config: EngineConfig, settings: Settings, newest: Callable[[], EngineFacts]) -> ServerInfo:
    """What the endpoints print of one engine."""
    facts = newest()
    model, template = settings.model, facts.frontend.chat_template
    contract = bits_depend_on(config, settings, facts.worker.device) if model.deterministic else {}
    return ServerInfo(
        model_name=model.name,
        model_path=config.model_path,
        tokenizer_path=model.files.tokenizer_dir,
        max_model_len=model.max_len,
        max_running_requests=settings.scheduler.max_running_requests,
        version=__version__,
        architectures=tuple(model.files.config.get("architectures", ())),
        model_type=str(model.files.config.get("model_type", "")),
        skip_tokenizer_init=settings.skip_tokenizer_init,
        keys=settings.server.keys,
        aliases=model.aliases,
        sampling_defaults=settings.server.sampling_defaults,
        num_steps=settings.spec.num_steps,
        cors_allow_origins=settings.server.cors_allow_origins,
        hosts=_host_rules(settings.server),
        http=settings.server.http,
        ui=settings.server.ui,
        method=settings.spec.method,
        max_queued_requests=settings.link.max_queued_requests,
        ranks=settings.ranks,
        settings=settled_flags(config, settings)
        | _verification(settings, facts)
        | ({"bits_depend_on": contract} if contract else {}),
        fingerprint=fingerprint_of(contract) if contract else UNSET,
        facts=lambda: newest().report(),
        call_format=call_format(settings.server.tool_call_parser, template),
        reasoning_format=reasoning_format(settings.server.reasoning_parser, template),
    )


def bits_depend_on(config: EngineConfig, settings: Settings, device: str) -> dict[str, str]:
    """All that the bits of tokens and log-probs depend on with --enable-deterministic-inference, beside the request."""
    model = settings.model
    return {
        "weights": " ".join(filter(None, (config.model_path, config.revision, model.files.load_format))),
        "config": hashlib.sha256(msgspec.json.encode(model.files.config, order="deterministic")).hexdigest()[:16],
        "dtype": model.dtype,
        "kv_cache_dtype": settings.cache.kv_dtype or model.dtype,
        "kernels": _digest_of_kernels(),
        "device": device,
        **{package: _version_of(package) for package in ("torch", "triton")},
    }


def fingerprint_of(contract: dict[str, str]) -> str:
    """`system_fingerprint` of replies, which OpenAI has for this."""
    return f"bits-{hashlib.sha256(msgspec.json.encode(contract, order='sorted')).hexdigest()[:16]}"


def _digest_of_kernels() -> str:
    """A digest of the kernels' sources. They are not imported: the server needs no torch."""
    digest, found = hashlib.sha256(), find_spec("overlap_spec_kernels")
    assert found is not None and found.origin is not None
    package = Path(found.origin).parent
    for source in sorted(path for path in package.rglob("*") if path.suffix in {".py", ".cu", ".h", ".cpp"}):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _host_rules(server: ServerSettings) -> HostRules | None:
    """None where other machines call the server anyway, or a key is asked for that no web page has."""
    if not server.allowed_hosts and (server.keys.names or not server.is_loopback):
        return None
    return host_rules(server.allowed_hosts, server.cors_allow_origins)


def _verification(settings: Settings, facts: EngineFacts) -> dict[str, str]:
    """How guesses are judged, as the worker reports: flags do not tell that of a method with a verifier of its own."""
    return {"verification": facts.worker.verification} if settings.spec.width > 1 else {}

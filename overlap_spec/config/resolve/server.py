"""Resolves what the server keeps apart, and what it tells: clients that share nothing that is cached, and where traces
of requests go (`--otlp-traces-endpoint`, `--enable-trace`).
"""

import secrets
from pathlib import Path
from urllib.parse import urlsplit

from overlap_spec.config.flags import EngineConfig
from overlap_spec.config.settings import ApiKeys, IsolationSettings, OtlpTarget
from overlap_spec.errors import ConfigError

MOST_BYTES = 1 << 20  # of --shared-prefix
FEW_NAMES = 8  # that a note lists
ALL_CLIENTS = "what concerns all clients (abort_all, flush_cache, /audit, /ui/live, /ui/timeline)"

SGLANG_ENDPOINT = "localhost:4317"  # its default
GRPC, HTTP = "grpc", "http/protobuf"
HTTP_PATH = "/v1/traces"


def resolve_isolation(config: EngineConfig, keys: ApiKeys, notes: list[str]) -> tuple[IsolationSettings, ApiKeys]:
    """By default clients are isolated as soon as keys have two names. Raises: ConfigError naming the flag.

    What concerns all clients shows others' requests, and ends them: the operator alone may do it. Where none is
    named, the keys that are returned have one that only the engine's own processes know.
    """
    names = tuple(dict.fromkeys(keys.names.values()))
    isolates = len(names) > 1 if config.isolate_clients is None else config.isolate_clients
    if isolates and not names:
        raise ConfigError("isolate_clients", "tells clients apart by the names of their keys: give --api-key-file")
    if not isolates:
        if config.shared_prefix is not None:
            raise ConfigError("shared_prefix", "has no effect: clients are not isolated, so they share every prefix")
        if len(names) > 1:
            notes.append(f"{_listed(names)} are not isolated; they can find out what others have sent")
        return IsolationSettings(), keys
    if config.shared_prefix is None:
        shared, hint = "", "--shared-prefix FILE names a system prompt that all may share"
    else:
        shared, hint = _text_of(config), f"they share what begins as {config.shared_prefix}"
    notes.append(f"{_listed(names)} share no cached prefix (--no-isolate-clients lets them); {hint}")
    if config.speculative_ngram_external_corpus_path is not None:
        notes.append("isolated clients get no guesses from the corpus of n-grams (--no-isolate-clients lets them)")
    if keys.admin is None:
        notes.append(f"{ALL_CLIENTS} is refused to every client: --admin-api-key names an operator")
        keys = ApiKeys(keys.names, secrets.token_urlsafe(), keys.sharing)
    return IsolationSettings(names, shared), keys


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - FEW_NAMES
    return "clients " + ", ".join(names[:FEW_NAMES]) + (f" and {more} more" if more > 0 else "")


def _text_of(config: EngineConfig) -> str:
    assert config.shared_prefix is not None
    if config.skip_tokenizer_init:
        raise ConfigError("shared_prefix", "is a text, and with --skip-tokenizer-init there are token ids only")
    path = Path(config.shared_prefix).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode().removesuffix("\n")
    except OSError as error:
        raise ConfigError("shared_prefix", f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError("shared_prefix", f"{path} is not UTF-8") from None
    if len(content) > MOST_BYTES:
        raise ConfigError("shared_prefix", f"{path} has more than {MOST_BYTES} bytes")
    if not text:
        raise ConfigError("shared_prefix", f"{path} is empty")
    return text


def otlp_target(config: EngineConfig, protocol: str | None) -> OtlpTarget | None:
    """The collector; None if no traces are asked for. `protocol`: what the environment asks for, if it does.

    Without it a URL is sent to over HTTP, and HOST:PORT, or grpc://, over gRPC. Raises: ConfigError.
    """
    if config.otlp_traces_endpoint is None and not config.enable_trace:
        return None
    given = config.otlp_traces_endpoint or SGLANG_ENDPOINT
    if protocol not in (None, GRPC, HTTP):
        wrong = f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol!r}: {GRPC} and {HTTP} are built"
        raise ConfigError("otlp_traces_endpoint", wrong)
    scheme, host, path = _split(given)
    protocol = protocol or (HTTP if scheme in ("http", "https") else GRPC)
    secure = "https" if scheme == "https" else "http"
    if protocol == HTTP:
        return OtlpTarget(f"{secure}://{host}{path if path.strip('/') else HTTP_PATH}", HTTP)
    return OtlpTarget(f"{secure}://{host}", GRPC)


def _split(given: str) -> tuple[str, str, str]:
    """Scheme, host with port, path."""
    text = given if "://" in given else f"grpc://{given}"
    try:
        parts = urlsplit(text)
        has_host = bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("grpc", "http", "https"):
        wanted = "must be http://HOST:PORT, https://HOST:PORT or HOST:PORT"
        raise ConfigError("otlp_traces_endpoint", f"{wanted}, got {given!r}")
    return parts.scheme, parts.netloc, parts.path

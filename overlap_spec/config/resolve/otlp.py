"""Where traces of requests go (`--otlp-traces-endpoint`, `--enable-trace`)."""

from urllib.parse import urlsplit

from overlap_spec.config.flags import EngineConfig
from overlap_spec.config.settings import OtlpTarget
from overlap_spec.errors import ConfigError

SGLANG_ENDPOINT = "localhost:4317"  # its default
GRPC, HTTP = "grpc", "http/protobuf"
HTTP_PATH = "/v1/traces"


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

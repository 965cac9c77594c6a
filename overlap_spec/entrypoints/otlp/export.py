"""Sends batches of spans to the collector, and logs once that it cannot."""

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from overlap_spec.config.settings import OtlpTarget
from overlap_spec.version import __version__

MOST_WAITING = 4096  # spans; about 700 requests
BATCH = 512
EVERY_MS = 2000
TRY_S = 5  # for a batch, repetitions included

log = logging.getLogger(__name__)


def provider_for(target: OtlpTarget) -> TracerProvider:
    """What makes tracers whose spans go to the collector."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs every batch; `OnceLogged` logs the first
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    exporter = OnceLogged(_exporter(target), target.endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter, MOST_WAITING, EVERY_MS, BATCH))
    return provider


def _exporter(target: OtlpTarget) -> SpanExporter:
    if target.protocol == "grpc":
        return GrpcExporter(endpoint=target.endpoint, insecure=target.endpoint.startswith("http://"), timeout=TRY_S)
    return HttpExporter(endpoint=target.endpoint, timeout=TRY_S)


def _resource() -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go first."""
    ours = Resource({SERVICE_NAME: "overlap-spec", "service.version": __version__})
    found = Resource.create()
    if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        return found.merge(ours)
    return ours.merge(found)


class OnceLogged(SpanExporter):  # type: ignore[misc,unused-ignore]  # Any where the extra is not installed
    """Another exporter, whose state is logged when it changes."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called by the processor's thread."""
        result = self._exporter.export(spans)
        is_down = result is not SpanExportResult.SUCCESS
        if is_down and not self._is_down:
            log.warning("traces: %s takes no spans; they are dropped until it does", self._endpoint)
        elif self._is_down and not is_down:
            log.info("traces: %s takes spans again", self._endpoint)
        self._is_down = is_down
        return result

    def shutdown(self) -> None:
        """Called once, at the end."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing waits here."""
        return True

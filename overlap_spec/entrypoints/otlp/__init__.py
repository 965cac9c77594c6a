"""Spans of requests for an OpenTelemetry collector (extra `otlp`): made beside the answer, sent by a thread of its own.

    chat MODEL ............................. one span a request, with OpenTelemetry's attributes for generative AI
      tokenize | queued | prefill | decode   its phases; decode ends with the last tokens' arrival
                                 detokenize  from there to the last text

Attributes are OpenTelemetry's semantic conventions for generative AI, and three latencies that vLLM has too. At most
`MOST_WAITING` spans wait to be sent; more are dropped. A collector that cannot be reached is logged once.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from overlap_spec.config.settings import OtlpTarget
from overlap_spec.entrypoints.http.engine_client import DeltaLike
from overlap_spec.entrypoints.http.request_spans import RequestSpan, RequestSpans, current_call
from overlap_spec.messages import Finish, FinishKind, Phases, SamplingParams, Usage
from overlap_spec.version import __version__

MOST_WAITING = 4096  # spans; about 700 requests
BATCH = 512
EVERY_MS = 2000
TRY_S = 5  # for a batch, repetitions included

log = logging.getLogger(__name__)


def open_spans(target: OtlpTarget, model: str) -> RequestSpans:
    """What sends spans of a model's requests to the collector."""
    return OtlpSpans(target, model)


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


Value = str | int | float | list[str]

PROVIDER = "overlap_spec"
COMPLETIONS = ("/v1/completions", "/generate")  # paths of text completions; all others are chats
NS = 1_000_000_000


class OtlpSpans:
    """Makes the spans of one server."""

    def __init__(self, target: OtlpTarget, model: str) -> None:
        self.model = model
        self._provider = provider_for(target)
        self._tracer = self._provider.get_tracer("overlap_spec", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, request_id: str, sampling: SamplingParams) -> Iterator[RequestSpan]:
        call = current_call.get()
        operation = "text_completion" if call.path in COMPLETIONS else "chat"
        span = self._tracer.start_span(
            f"{operation} {self.model}",
            context=self._propagator.extract(call.carrier),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self.model,
                "gen_ai.response.id": request_id,
                "url.path": call.path,
                **_asked(sampling),
            },
        )
        recorded = OtlpSpan(span, self)
        try:
            yield recorded
        except BaseException as error:  # also of a client that has left
            recorded.failed(error)
            raise
        finally:
            recorded.end()

    def phase(self, name: str, parent: Context, begin_ns: int, end_ns: int) -> None:
        self._tracer.start_span(name, context=parent, start_time=begin_ns).end(max(begin_ns, end_ns))

    def close(self, timeout_s: float) -> None:
        """See `RequestSpans`. A thread that still tries to send is left behind."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)


class OtlpSpan:
    """One request's."""

    def __init__(self, span: Span, spans: OtlpSpans) -> None:
        self._span = span
        self._spans = spans
        self._begun = time.monotonic()
        self._to_ns = time.time_ns() - time.monotonic_ns()  # of the clock that all processes share
        self._first_token = 0.0
        self._last: DeltaLike | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether a collector will see it; the parent may not be sampled."""
        return bool(self._span.is_recording())

    def add(self, delta: DeltaLike) -> None:
        """Note what a step has added."""
        self._last = delta
        if not self._first_token:
            self._first_token = time.monotonic()

    def aborted(self, reason: str) -> None:
        """Note that the request was ended before its end."""
        self._span.set_attribute("gen_ai.response.finish_reasons", ["abort"])
        self._span.set_status(StatusCode.ERROR, reason)

    def failed(self, error: BaseException) -> None:
        """Note what has ended the block. A client that leaves cancels it."""
        if self._last is not None and self._last.finish is not None:
            return  # the request has ended; what follows is of its answer
        is_gone = not isinstance(error, Exception)
        self._span.set_attribute("error.type", "client_gone" if is_gone else type(error).__name__)
        self._span.set_status(StatusCode.ERROR, "the client has left" if is_gone else str(error))

    def end(self) -> None:
        """Add what is known of the request, and its phases."""
        if self.is_recorded and self._last is not None:
            self._span.set_attributes(self._answered(self._last.usage, self._last.finish))
            if self._last.phases is not None:
                self._add_phases(self._last.phases)
        self._span.end()

    def _answered(self, usage: Usage, finish: Finish | None) -> dict[str, Value]:
        found: dict[str, Value] = {
            "gen_ai.response.model": self._spans.model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.latency.time_to_first_token": self._first_token - self._begun,
            "gen_ai.latency.e2e": time.monotonic() - self._begun,
            "overlap_spec.verify_steps": usage.spec_verify_ct,
        }
        if usage.spec_verify_ct:  # the first token is the prefill's
            found["overlap_spec.accept_length"] = (usage.completion_tokens - 1) / usage.spec_verify_ct
        if finish is not None and finish.kind is not FinishKind.ABORT:
            found["gen_ai.response.finish_reasons"] = [finish.kind.value]
        return found

    def _add_phases(self, phases: Phases) -> None:
        parent = set_span_in_context(self._span)
        times = phases.received, phases.admitted, phases.started, phases.first_token, phases.last_token, phases.ended
        names = "tokenize", "queued", "prefill", "decode", "detokenize"
        for name, begin, end in zip(names, times, times[1:], strict=False):
            if begin and end:
                self._spans.phase(name, parent, self._ns(begin), self._ns(end))
        if phases.started:
            self._span.set_attribute("gen_ai.latency.time_in_queue", phases.started - self._begun)
        self._span.set_attribute("overlap_spec.detokenize_seconds", phases.detokenize_s)

    def _ns(self, seconds: float) -> int:
        return int(seconds * NS) + self._to_ns


def _asked(sampling: SamplingParams) -> dict[str, Value]:
    asked: dict[str, Value | None] = {
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k if sampling.top_k > 0 else None,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
    }
    return {name: value for name, value in asked.items() if value is not None}

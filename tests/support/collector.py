"""A collector of traces: a server that takes OTLP over HTTP or gRPC, and keeps the spans.

Tests that import it, or `overlap_spec.entrypoints.otlp` after it, are skipped without the extra `otlp`.
"""

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra otlp")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", reason="needs the extra otlp")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="needs the extra otlp")

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest as Export,
    ExportTraceServiceResponse as Exported,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from overlap_spec.config.settings import OtlpTarget


@dataclass
class Collector:
    """The spans that have come, in plain values; `resources`: attributes of their senders."""

    target: OtlpTarget = field(default_factory=lambda: OtlpTarget("", ""))
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    takes: bool = True
    num_refused: int = 0  # batches, while it took none

    def add(self, request: Export) -> None:
        for group in request.resource_spans:
            self.resources.append(values_of(group.resource.attributes))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def named(self, name: str, timeout_s: float = 10.0) -> Any:
        """The one span of that name, when it has come."""
        deadline = time.monotonic() + timeout_s
        while not (found := [span for span in self.spans if span.name == name]):
            assert time.monotonic() < deadline, f"no {name} in {[span.name for span in self.spans]}"
            time.sleep(0.01)
        (span,) = found
        return span

    def children(self, parent: Any) -> dict[str, Any]:
        return {span.name: span for span in self.spans if span.parent_span_id == parent.span_id}


def values_of(attributes: Any) -> dict[str, Any]:
    """Attributes as Python's values."""

    def value_of(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {each.key: value_of(each.value) for each in attributes}


@contextmanager
def http_collector() -> Iterator[Collector]:
    """One that takes `POST /v1/traces`; 400 while `takes` is false."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.takes:
                collector.add(Export.FromString(body))
            else:
                collector.num_refused += 1
            self.send_response((200 if self.path == "/v1/traces" else 404) if collector.takes else 400)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.target = OtlpTarget(f"http://127.0.0.1:{server.server_port}/v1/traces", "http/protobuf")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield collector
        server.shutdown()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """One that takes gRPC."""
    collector = Collector()

    class Servicer(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.add(request)
            return Exported()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Servicer(), server)
    collector.target = OtlpTarget(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", "grpc")
    server.start()
    yield collector
    server.stop(None)

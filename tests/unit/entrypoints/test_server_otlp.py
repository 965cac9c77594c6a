"""Spans of requests as a collector gets them, over HTTP and gRPC. Skipped without the extra `otlp`."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from support.collector import Collector, grpc_collector, http_collector, values_of
from support.fake_engine_client import INFO, FakeClient, healthy

from overlap_spec.config.settings import OtlpTarget
from overlap_spec.entrypoints import otlp
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.otlp import OtlpSpans
from overlap_spec.messages import SamplingParams

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "one two three"}], "seed": 7, "max_tokens": 9}


@contextmanager
def sending(collector: Collector, every_ms: int = 20) -> Iterator[OtlpSpans]:
    """Spans that are on their way soon."""
    before, otlp.EVERY_MS = otlp.EVERY_MS, every_ms
    spans = OtlpSpans(collector.target, "tiny")
    otlp.EVERY_MS = before
    yield spans
    spans.close(5.0)


def post(spans: OtlpSpans, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    async def inner() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(FakeClient(), INFO, healthy, spans=spans))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.post(path, json=body, headers=headers)

    return asyncio.run(inner())


@pytest.mark.parametrize("kind", [http_collector, grpc_collector], ids=["http", "grpc"])
def test_a_chat_is_one_span_with_its_attributes(kind: Callable[[], Any]) -> None:
    with kind() as collector, sending(collector) as spans:
        reply = post(spans, "/v1/chat/completions", CHAT)
        assert reply.status_code == 200
        span = collector.named("chat tiny")
    found = values_of(span.attributes)
    usage = reply.json()["usage"]
    assert found["gen_ai.operation.name"] == "chat" and found["url.path"] == "/v1/chat/completions"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "tiny"
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert (found["gen_ai.request.seed"], found["gen_ai.request.max_tokens"]) == (7, 9)
    assert found["overlap_spec.accept_length"] == (usage["completion_tokens"] - 1) / found["overlap_spec.verify_steps"]
    assert 0 <= found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert (span.kind, span.status.code, span.parent_span_id) == (2, 0, b"")  # a server's, unset, a root
    assert span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
    assert collector.resources[0]["service.name"] == "overlap-spec"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_a_parent_of_the_client_is_the_spans_parent(path: str, streams: bool) -> None:
    body: dict[str, Any] = {"stream": streams, "text": "a b"} if path == "/generate" else {**CHAT, "stream": streams}
    if path == "/v1/completions":
        body = {"model": "tiny", "prompt": "a b", "stream": streams}
    with http_collector() as collector, sending(collector) as spans:
        assert post(spans, path, body, traceparent=f"00-{TRACE}-{PARENT}-01").status_code == 200
        span = collector.named("chat tiny" if "chat" in path else "text_completion tiny")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)


def test_a_parent_that_is_not_sampled_has_no_spans() -> None:
    with http_collector() as collector, sending(collector) as spans:
        post(spans, "/v1/chat/completions", CHAT, traceparent=f"00-{TRACE}-{PARENT}-00")
        post(spans, "/v1/completions", {"model": "tiny", "prompt": "last"})
        collector.named("text_completion tiny")
        assert len(collector.spans) == 1


def test_each_choice_has_its_span() -> None:
    with http_collector() as collector, sending(collector) as spans:
        post(spans, "/v1/completions", {"model": "tiny", "prompt": ["a", "b c"]}, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert [span.parent_span_id.hex() for span in collector.spans] == [PARENT] * 2


@pytest.mark.parametrize(
    ("words", "error"), [("dead", "ActorDied"), ("busy", "Overloaded"), ("a late", "RequestTimeout")]
)
def test_a_request_that_fails_has_the_error(words: str, error: str) -> None:
    with http_collector() as collector, sending(collector) as spans:
        assert post(spans, "/v1/completions", {"model": "tiny", "prompt": words}).status_code >= 500
        span = collector.named("text_completion tiny")
    assert span.status.code == 2 and values_of(span.attributes)["error.type"] == error


def test_a_collector_that_is_down_is_logged_once_and_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    down = Collector(OtlpTarget("http://127.0.0.1:9/v1/traces", "http/protobuf"))
    caplog.set_level(logging.INFO)
    begun = time.monotonic()
    with sending(down) as spans:
        for _ in range(3):
            assert post(spans, "/v1/completions", {"model": "tiny", "prompt": "a b"}).status_code == 200
        answered = time.monotonic() - begun
        while not (lines := [line for line in caplog.messages if "takes no spans" in line]):
            assert time.monotonic() < begun + 30
            time.sleep(0.05)
        spans.close(0.2)
    assert answered < 2.0
    assert lines == ["traces: http://127.0.0.1:9/v1/traces takes no spans; they are dropped until it does"]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_a_collector_that_comes_back_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with http_collector() as collector, sending(collector) as spans:
        collector.takes = False
        deadline = time.monotonic() + 10
        for count in (1, 2, 3):
            post(spans, "/v1/completions", {"model": "tiny", "prompt": "a"})
            while collector.num_refused < count:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        collector.takes = True
        post(spans, "/v1/completions", {"model": "tiny", "prompt": "b"})
        collector.named("text_completion tiny")
    assert [line.partition("takes ")[2] for line in caplog.messages if line.startswith("traces:")] == [
        "no spans; they are dropped until it does",
        "spans again",
    ]


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MOST_WAITING", 8)
    monkeypatch.setattr(otlp, "BATCH", 8)
    with http_collector() as collector, sending(collector, every_ms=60_000) as spans:
        sent = []

        def slow(batch: Any) -> Any:
            time.sleep(0.3)
            sent.append(len(batch))
            return otlp.SpanExportResult.SUCCESS

        monkeypatch.setattr(otlp.OnceLogged, "export", lambda self, batch: slow(batch))
        for _ in range(200):
            with spans.request("r", SamplingParams()):
                pass
    assert sum(sent) <= 3 * 8, "one batch on its way, one that waits, and what came meanwhile"


def test_an_end_does_not_wait_for_a_collector_that_hangs() -> None:
    """It accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = OtlpTarget(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", "http/protobuf")
        spans = OtlpSpans(target, "tiny")
        assert post(spans, "/v1/completions", {"model": "tiny", "prompt": "a"}).status_code == 200
        begun = time.monotonic()
        spans.close(0.3)
        assert time.monotonic() - begun < 3.0  # a try takes five

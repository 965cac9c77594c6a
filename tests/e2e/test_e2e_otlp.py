"""A server that sends spans of its requests to a collector. Skipped without the extra `otlp`."""

from pathlib import Path

import httpx
import pytest
from support.collector import http_collector, values_of
from support.command_line import Service

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 20, "stream": True}


@pytest.mark.slow
def test_what_a_server_has_answered_is_with_the_collector_when_it_has_ended(
    tmp_path: Path, tiny_flags: tuple[str, ...]
) -> None:
    with http_collector() as collector:
        endpoint = collector.target.endpoint.removesuffix("/v1/traces")
        named = "--served-model-name", "tiny", "--otlp-traces-endpoint", endpoint
        with Service(tmp_path, *tiny_flags, *named, OTEL_SERVICE_NAME="mine") as service:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            httpx.post(f"{service.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=60)
            service.terminate()
            assert service.process.wait(20) == 0
        span = collector.named("chat tiny", timeout_s=0.0)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    phases = ["decode", "detokenize", "prefill", "queued", "tokenize"]
    assert sorted(collector.children(span)) == phases
    assert values_of(span.attributes)["gen_ai.usage.output_tokens"] <= 20
    assert collector.resources[0]["service.name"] == "mine"


@pytest.mark.full
def test_a_collector_that_is_down_changes_nothing_for_a_server(tmp_path: Path, tiny_flags: tuple[str, ...]) -> None:
    flags = "--served-model-name", "tiny", "--enable-trace", "--otlp-traces-endpoint", "127.0.0.1:9"
    with Service(tmp_path, *tiny_flags, *flags) as service:
        for _ in range(3):
            assert httpx.post(f"{service.url}/v1/chat/completions", json=CHAT, timeout=60).status_code == 200
        assert service.logs("traces: http://127.0.0.1:9 takes no spans", timeout_s=60)
        service.terminate()
        assert service.process.wait(20) == 0
        assert service.log().count("takes no spans") == 1 and "Traceback" not in service.log()

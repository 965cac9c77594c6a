"""Where traces of requests go, as SGLang's and vLLM's commands give it."""

import sys

import pytest

from overlap_spec import EngineConfig
from overlap_spec.config.resolve import otlp_target
from overlap_spec.entrypoints.cli import main
from overlap_spec.errors import ConfigError

HTTP, GRPC = "http/protobuf", "grpc"


@pytest.mark.parametrize(
    ("given", "protocol", "endpoint", "spoken"),
    [
        ("http://c:4318", None, "http://c:4318/v1/traces", HTTP),
        ("http://c:4318/", None, "http://c:4318/v1/traces", HTTP),
        ("https://c/own/path", None, "https://c/own/path", HTTP),
        ("http://c:4317", GRPC, "http://c:4317", GRPC),
        ("https://c:4317", GRPC, "https://c:4317", GRPC),
        ("c:4317", None, "http://c:4317", GRPC),
        ("grpc://c:4317", None, "http://c:4317", GRPC),
        ("[::1]:4317", None, "http://[::1]:4317", GRPC),
        ("c:4318", HTTP, "http://c:4318/v1/traces", HTTP),
        (None, None, "http://localhost:4317", GRPC),
    ],
)
def test_an_endpoint_tells_its_protocol_unless_the_environment_does(
    given: str | None, protocol: str | None, endpoint: str, spoken: str
) -> None:
    found = otlp_target(EngineConfig(otlp_traces_endpoint=given, enable_trace=True), protocol)
    assert found is not None and (found.endpoint, found.protocol) == (endpoint, spoken)


def test_without_a_flag_there_is_none() -> None:
    assert otlp_target(EngineConfig(), GRPC) is None
    assert otlp_target(EngineConfig(otlp_traces_endpoint="c:1"), None) is not None


@pytest.mark.parametrize("given", ["ftp://c:1", "http://", ":4317", "c:port", "c:70000", "http://[c:1"])
def test_what_is_no_endpoint_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="otlp.traces.endpoint.*must be http://HOST:PORT"):
        otlp_target(EngineConfig(otlp_traces_endpoint=given), None)


def test_a_protocol_that_is_not_built_is_refused() -> None:
    with pytest.raises(ConfigError, match="'http/json': grpc and http/protobuf are built"):
        otlp_target(EngineConfig(enable_trace=True), "http/json")


def test_the_flag_without_the_extra_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "overlap_spec.entrypoints.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    assert main(["serve", "--otlp-traces-endpoint", "http://127.0.0.1:4318", "--model", "/nowhere"]) == 2
    assert "pip install 'overlap-spec[otlp]'" in capsys.readouterr().err

"""Access log, request ids, pings, and the flush that waits."""

import logging
from typing import Any

import pytest
from support.fake_engine_client import FakeClient, ask

from overlap_spec.entrypoints.http import operations
from overlap_spec.runtime.log_limits import Allowance

BAD: Any = {"prompt": "a", "temperature": -1}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("access_log")]


def test_an_error_is_logged_with_its_reason_and_the_clients_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answer = ask(FakeClient(), "POST", "/v1/completions", json=BAD, headers={"x-request-id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"
    ask(FakeClient(), "GET", "/no/such%20page")
    ask(FakeClient(), "POST", "/v1/completions", content=b"{")
    bad, missing, broken = lines(caplog)
    assert '"POST /v1/completions" 400 ' in bad
    assert bad.endswith("ms id=mine-7: temperature must be a finite number >= 0, got -1.0")
    assert '"GET /no/such%20page" 404 ' in missing and missing.endswith(": Not Found")
    assert "the body is not valid JSON" in broken


def test_good_answers_are_logged_and_probes_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for path in ("/health", "/ping", "/metrics", "/v1/models"):
        assert ask(FakeClient(), "GET", path).status_code == 200
    (line,) = lines(caplog)
    assert '"GET /v1/models" 200 ' in line


def test_a_key_never_reaches_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ask(FakeClient(), "GET", "/v1/models?api_key=hidden", headers={"authorization": "Bearer hidden"})
    assert "hidden" not in "\n".join(lines(caplog))


@pytest.mark.parametrize("name", ["", "a" * 257, "with space", "tab\tbed"])
def test_an_unfit_id_is_replaced(name: str) -> None:
    given = ask(FakeClient(), "GET", "/ping", headers={"x-request-id": name}).headers["x-request-id"]
    assert given != name and len(given) == 32
    assert given != ask(FakeClient(), "GET", "/ping").headers["x-request-id"]


def test_streams_have_the_id_too() -> None:
    body = {"prompt": "a b", "stream": True}
    answer = ask(FakeClient(), "POST", "/v1/completions", json=body, headers={"x-request-id": "s1"})
    assert answer.headers["x-request-id"] == "s1"


def test_a_stream_that_ends_with_an_error_is_logged_with_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ask(FakeClient(), "POST", "/v1/completions", json={"prompt": "one two fail", "stream": True})
    (line,) = lines(caplog)
    assert '" 200 ' in line and line.endswith(": the engine has failed: worker: killed by signal 9")


def test_lines_are_limited_and_what_was_withheld_is_counted() -> None:
    allowance = Allowance(burst=3, per_s=1000.0)
    assert [allowance.take() for _ in range(3)] == [0, 0, 0]
    allowance._per_s = 0.0
    allowance._left = 0.0
    assert [allowance.take() for _ in range(5)] == [None] * 5
    allowance._left = 1.0
    assert allowance.take() == 5


def test_ping_says_what_health_says() -> None:
    for method in ("GET", "POST"):
        assert ask(FakeClient(), method, "/ping").status_code == 200


class BusyClient(FakeClient):
    """In use for the first few attempts."""

    attempts = 0

    async def flush_cache(self) -> bool:
        self.attempts += 1
        return self.attempts > 3


def test_a_flush_waits_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "FLUSH_POLL_S", 0.001)
    for path in ("/flush_cache", "/reset_prefix_cache"):
        assert ask(BusyClient(), "POST", path).status_code == 400
        assert ask(BusyClient(), "POST", f"{path}?timeout=5").status_code == 200
        late = ask(FakeClient(flushable=False), "POST", f"{path}?timeout=0.02")
        assert (late.status_code, late.json()["error"]["code"]) == (400, "busy")


@pytest.mark.parametrize("timeout", ["soon", "-1", "nan", "inf", "1e9", ""])
def test_a_flush_with_no_number_of_seconds_is_refused(timeout: str) -> None:
    error = ask(FakeClient(), "POST", f"/flush_cache?timeout={timeout}").json()["error"]
    assert error["param"] == "timeout"

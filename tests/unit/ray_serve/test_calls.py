"""What of a request the ingress sends to a replica, and how many replicas requests need. No Ray is needed."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from overlap_spec.cli import main
from overlap_spec.ray.calls import MOST_TEXT, call_of, prompt_of
from overlap_spec.ray.scaling import wanted_replicas

SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/llm/flush_cache",
    "root_path": "/llm",
    "headers": [(b"authorization", b"Bearer key")],
    "client": ("10.0.0.7", 4711),
    "state": {"is_admin": True},
    "app": object(),
}


def test_a_call_has_the_paths_of_the_app_and_nothing_that_the_app_decides() -> None:
    """The gate compares paths, and believes what is in `state`."""
    call = call_of(SCOPE, b"{}")
    assert call.scope["path"] == "/flush_cache" and call.scope["root_path"] == ""
    assert call.scope["headers"] == SCOPE["headers"] and call.scope["client"] == SCOPE["client"]
    assert not {"state", "app"} & set(call.scope)


def test_turns_of_a_conversation_begin_alike() -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    then = [*first, {"role": "assistant", "content": "So."}, {"role": "user", "content": "How?"}]
    short, long = (prompt_of(json.dumps({"model": "m", "messages": turns}).encode()) for turns in (first, then))
    assert long.startswith(short[:-1]) and "Why?" in short


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (b'{"prompt": "once", "model": "m"}', '"once"'),
        (b'{"input_ids": [5, 6]}', "[5, 6]"),
        (b'{"messages": [1], "tools": [2]}', "[2][1]"),
        (b'{"instructions": "a", "input": "b"}', '"a""b"'),
        (b'{"rid": "7"}', ""),
        (b"[1]", ""),
        (b"{", ""),
        (b"\xff", ""),
        (b"", ""),
        (b'{"text": "' + b"x" * 2 * MOST_TEXT + b'"}', '"' + "x" * (MOST_TEXT - 1)),
    ],
)
def test_the_prompt_of_a_body(body: bytes, prompt: str) -> None:
    assert prompt_of(body) == prompt


@pytest.mark.parametrize(
    ("requests", "waiting", "running", "wanted"),
    [
        (0, {"a": 0.0}, {"a": 0.0}, 0.0),
        (96, {"a": 0.0}, {"a": 48.0}, 2.0),  # Serve's own rule
        (10, {"a": 6.0}, {"a": 3.0}, 3.0),  # the pool is full of three: two more replicas like this one
        (10, {"a": 4.0}, {"a": 0.0}, 5.0),  # nothing runs yet
        (10, {}, {}, 10 / 48),  # nothing was reported yet
    ],
)
def test_waiting_requests_need_replicas(
    requests: float, waiting: dict[str, float], running: dict[str, float], wanted: float
) -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 48.0)
    metrics: Any = {"waiting": waiting, "running": running}
    context = SimpleNamespace(
        current_num_replicas=1, total_num_requests=requests, aggregated_metrics=metrics, config=config
    )
    assert wanted_replicas(context)[0] == pytest.approx(wanted)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"overlap-spec\[ray\]"):
        from overlap_spec.ray import build_app  # noqa: F401
    assert main(["serve-ray", "--num-replicas", "2"]) == 1
    assert "pip install 'overlap-spec[ray]'" in capsys.readouterr().err
    assert main(["serve-ray", "--num-replicas", "0"]) == 2
    assert "--num-replicas: must be" in capsys.readouterr().err

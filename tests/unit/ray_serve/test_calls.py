"""What of a request the ingress sends to a replica, and how many replicas requests need: what takes no Ray."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import overlap_spec.entrypoints.ray
from overlap_spec.config.fields import config_from, flags_from
from overlap_spec.entrypoints.cli import main
from overlap_spec.entrypoints.ray.calls import MOST_TEXT, call_of, may_isolate, merged_metrics, prompt_of, sender_of
from overlap_spec.entrypoints.ray.scaling import ReplicaFlags, wanted_replicas

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
    assert short == '"Be brief.""Why?"' and long.startswith(short)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (b'{"prompt": "once", "model": "m"}', '"once"'),
        (b'{"input_ids": [5, 6]}', "[5, 6]"),
        (b'{"messages": [{"content": "a"}], "tools": [{"name": "f"}]}', '[{"name": "f"}]"a"'),
        (b'{"messages": [1]}', "[1]"),
        (b'{"input": [{"type": "function_call", "name": "f"}, {"content": [{"text": "a"}]}]}', '[{"text": "a"}]'),
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


def test_texts_of_different_salts_differ_from_their_beginning() -> None:
    """By either name of it; one that is null or empty is none."""
    salts = ('"cache_salt": "a"', '"extra_key": "a"', '"cache_salt": "", "extra_key": "a"', '"extra_key": "b"')
    first, same, also, other = (prompt_of(b'{"prompt": "once", %s}' % salt.encode()) for salt in salts)
    assert first == same == also and first.endswith('"once"') and other.endswith('"once"')
    assert first[:8] != other[:8] and first != prompt_of(b'{"prompt": "once"}')
    for none in (b'"cache_salt": null', b'"extra_key": ""'):
        assert prompt_of(b'{"prompt": "once", %s}' % none) == '"once"'
    assert prompt_of(b'{"rid": "7", "cache_salt": "a"}') == ""


def test_texts_of_isolated_clients_differ_from_their_beginning() -> None:
    """Whichever header has the key; a client's salts are its own."""
    bodies = b'{"prompt": "once"}', b'{"prompt": "once", "cache_salt": "a"}'
    headers = ([(b"authorization", b"Bearer a")], [(b"authorization", b"Bearer b")], [(b"x-api-key", b"a")], [])
    senders = [sender_of({"headers": [(b"host", b"h"), *each]}) for each in headers]
    texts = [prompt_of(body, sender) for sender in senders for body in bodies]
    assert all(text.endswith('"once"') for text in texts) and len({text[:8] for text in texts}) == len(texts)
    assert prompt_of(bodies[0], senders[0]) == texts[0] and "Bearer" not in texts[0]
    assert senders[-1] == b"" and texts[-2] == '"once"' and prompt_of(b'{"rid": "7"}', senders[0]) == ""


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, False),
        ({"api_key": "k"}, False),
        ({"api_key_file": "keys"}, True),
        ({"api_key_file": "keys", "isolate_clients": False}, False),
        ({"api_key": "k", "isolate_clients": True}, True),
    ],
)
def test_prompts_are_compared_by_key_where_replicas_may_isolate_clients(flags: dict[str, Any], wanted: bool) -> None:
    assert may_isolate(config_from(flags)) is wanted


@pytest.mark.parametrize("salt", [b'"\\u0000"', b'"' + b"x" * 257 + b'"', b"5", b'["a", {}]'])
def test_a_bad_salt_is_for_the_app_to_refuse(salt: bytes) -> None:
    assert prompt_of(b'{"prompt": "once", "extra_key": %s}' % salt).endswith('"once"')


@pytest.mark.parametrize(
    ("requests", "waiting", "running", "known", "wanted"),
    [
        (0, {"a": 0.0}, {"a": 0.0}, None, 0.0),
        (96, {"a": 0.0}, {"a": 48.0}, None, 2.0),  # Serve's own rule
        (96, {"a": 40.0, "b": 0.0}, {"a": 48.0, "b": 9.0}, None, 2.0),  # all slots are in use: the same
        (12, {"a": 6.0, "b": 2.0}, {"a": 3.0, "b": 5.0}, None, 3.0),  # the pools are full of four
        (12, {"a": 0.0, "b": 0.0}, {"a": 4.0, "b": 4.0}, 4.0, 3.0),  # which is kept while no request waits
        (12, {"a": 0.0, "b": 0.0}, {"a": 6.0, "b": 4.0}, 4.0, 2.0),  # and corrected by an engine that runs more
        (4, {"a": 4.0}, {"a": 0.0}, None, 4.0),  # nothing runs yet
        (10, {}, {}, None, 10 / 48),  # nothing was reported yet
    ],
)
def test_open_requests_need_replicas(
    requests: float, waiting: dict[str, float], running: dict[str, float], known: float | None, wanted: float
) -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 48.0)
    metrics: Any = {"waiting": waiting, "running": running}
    context = SimpleNamespace(
        current_num_replicas=2,
        total_num_requests=requests,
        aggregated_metrics=metrics,
        config=config,
        policy_state={} if known is None else {"capacity": known},
    )
    assert wanted_replicas(context)[0] == pytest.approx(wanted)


def test_metrics_of_replicas_are_told_apart() -> None:
    text = """# HELP a:reqs Some.
# TYPE a:reqs gauge
a:reqs 1.0
# HELP b Text {with} 2 things.
# TYPE b histogram
b_bucket{le="+Inf",kind="x y"} 2.0
b_sum 3.0
"""
    merged = merged_metrics({"r1": text, "r2": text})
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert set(families) == {"a:reqs", "b"} and merged.count("# HELP") == 2
    samples = [(sample.name, sample.labels["replica"], sample.value) for sample in families["b"].samples]
    assert samples == [("b_bucket", "r1", 2), ("b_sum", "r1", 3), ("b_bucket", "r2", 2), ("b_sum", "r2", 3)]
    assert families["b"].samples[0].labels["kind"] == "x y"


def test_arguments_of_the_config_file_are_flags() -> None:
    text = (Path(__file__).parents[3] / "deploy" / "ray_serve.yaml").read_text()
    (application,) = yaml.safe_load(text)["applications"]
    names = set(ReplicaFlags.__struct_fields__)
    replicas = {name: value for name, value in application["args"].items() if name in names}
    engine = {name: value for name, value in application["args"].items() if name not in names}
    assert flags_from(replicas, ReplicaFlags).max_replicas == 4
    assert config_from(engine).drain_timeout == 60.0
    assert application["import_path"] == "overlap_spec.entrypoints.ray:build"
    assert "build" in overlap_spec.entrypoints.ray.__all__


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"overlap-spec\[ray\]"):
        from overlap_spec.entrypoints.ray import build_app  # noqa: F401 (the import alone fails)
    assert main(["serve-ray", "--num-replicas", "2"]) == 1
    assert "pip install 'overlap-spec[ray]'" in capsys.readouterr().err
    assert main(["serve-ray", "--num-replicas", "0"]) == 2
    assert "--num-replicas: must be" in capsys.readouterr().err

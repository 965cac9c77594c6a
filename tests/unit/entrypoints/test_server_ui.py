"""The page at `/ui`: its files and their headers, what it asks the server for, and who may ask."""

import asyncio
import json
import re
import time
from importlib.resources import files
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from support.fake_engine_client import INFO, FakeClient, ask, events_of, healthy

from overlap_spec.config import ApiKeys
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.ui import FILES, TYPES
from overlap_spec.messages import AdaptFigures, Record, Stats

LOCKED = replace(INFO, keys=ApiKeys({"secret": "one"}))
CLOSED = replace(INFO, ui=False)
KEY = {"authorization": "Bearer secret"}
FOLDER = files("overlap_spec.entrypoints.ui").joinpath("static")
SOURCES = {path.name: path.read_text() for path in FOLDER.iterdir()}
SAID = {"messages": [{"role": "user", "content": "one two three four"}]}
# The fake engine verifies 3 guesses in every step but the first, and accepts 1 of the third step's.
ORIGINS = [("plain", 1), ("bonus", 2), ("accepted", 3), ("bonus", 4)]


@pytest.mark.parametrize("name", FILES)
def test_files_are_served_with_their_types(name: str) -> None:
    response = ask(FakeClient(), "GET", f"/ui/{name}", LOCKED)
    assert response.text == SOURCES[name]
    assert response.headers["content-type"].split(";")[0] == TYPES[name.split(".")[1]]
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_runs_nothing_but_its_own_files() -> None:
    response = ask(FakeClient(), "GET", "/ui", LOCKED)
    assert response.headers["content-type"].startswith("text/html")
    policy = dict(each.split(" ", 1) for each in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert set(SOURCES) == {"index.html", *FILES}
    assert not re.search(r"<script(?! type=\"module\" src=\"ui/)|<style| style=| on\w+=", response.text)


def test_what_files_refer_to_is_served() -> None:
    found = set(re.findall(r'(?:href|src)="ui/([^"]+)"', SOURCES["index.html"]))
    for name, text in SOURCES.items():
        if name.endswith(".js"):
            found |= set(re.findall(r'from "\./([^"]+)"', text))
        elsewhere = [url for url in re.findall(r"https?://[^\s\"'<>]+", text) if url != "http://www.w3.org/2000/svg"]
        assert not elsewhere, name
    assert found == set(FILES)


def test_model_output_cannot_become_markup() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function|srcdoc"
    )
    assert not [name for name, text in SOURCES.items() if forbidden.search(text)]


@pytest.mark.parametrize("path", ["/ui", "/ui/main.js", "/ui/live", "/ui/timeline"])
def test_it_can_be_switched_off(path: str) -> None:
    assert ask(FakeClient(), "GET", path, CLOSED).status_code == 404


@pytest.mark.parametrize("name", ["none.js", "index.html", "..%2fapp.py", "%2e%2e"])
def test_no_other_file_is_served(name: str) -> None:
    assert ask(FakeClient(), "GET", f"/ui/{name}").status_code == 404


def test_figures_need_the_key() -> None:
    assert ask(FakeClient(), "GET", "/ui", LOCKED).status_code == 200
    for path in ("/ui/live", "/ui/timeline"):
        assert ask(FakeClient(), "GET", path, LOCKED).status_code == 401
        assert ask(FakeClient(), "GET", path, LOCKED, headers=KEY).status_code == 200


def test_figures_are_those_of_the_last_report() -> None:
    stats = Stats(
        num_running=2,
        num_queued=1,
        num_used_tokens=48,
        num_cached_tokens=33,
        max_total_tokens=160,
        gen_throughput=21.5,
        accept_length=2.25,
        accept_rate=0.5,
        step_time=0.25,
        gpu_gap=0.0625,
        host_time=0.125,
        host_time_hidden=0.0625,
        step_width=4,
        steps_total=9,
        generation_tokens_total=30,
        drafts_total=8,
        proposed_tokens_total=16,
        accepted_per_position_total=(6, 3, 1),
        experts_read=41.5,
        num_experts=128,
        snapshot_bytes=7,
        max_snapshot_bytes=21,
        snapshot_lookups_total=5,
        snapshot_hits_total=2,
        adapt=AdaptFigures(versions=2, samples=9, gain=0.25),
    )
    shown = ask(FakeClient(statistics=stats), "GET", "/ui/live", replace(INFO, num_steps=3, ranks=2)).json()
    assert shown == {
        "state": "ready",
        "draft": "unknown",
        "model": "tiny",
        "method": "",
        "ranks": 2,
        "num_steps": 3,
        "accept_length": 2.25,
        "accept_rate": 0.5,
        "accepted_per_position": [6, 3, 1],
        "drafts": 8,
        "proposed": 16,
        "tokens_per_s": 21.5,
        "generated": 30,
        "running": 2,
        "queued": 1,
        "first_token": {"newest": None, "mean": None, "count": 0},
        "pages": {
            "used": 3,
            "cached": 2,
            "total": 10,
            "size": 16,
            "snapshot_bytes": 7,
            "most_snapshot_bytes": 21,
            "snapshot_lookups": 5,
            "snapshot_hits": 2,
        },
        "step": {
            "device": 0.25,
            "gap": 0.0625,
            "host": 0.125,
            "host_hidden": 0.0625,
            "efficiency": None,
            "width": 4,
            "count": 9,
            "experts": 41.5,
            "num_experts": 128,
        },
        "adapt": {
            "versions": 2,
            "dropped": 0,
            "refused": 0,
            "steps": 0,
            "samples": 9,
            "seconds": 0.0,
            "live_length": 0.0,
            "copy_length": 0.0,
            "gain": 0.25,
        },
    }


def test_each_streamed_token_comes_with_what_the_page_shows_of_it() -> None:
    asked = {"logprobs": True, "top_logprobs": 2, "speculative": {"provenance": True}, "stream": True}
    *events, done = events_of(ask(FakeClient(), "POST", "/v1/chat/completions", json={**SAID, **asked}))
    choices = [json.loads(event)["choices"][0] for event in events]
    tokens = [choice for choice in choices if choice["logprobs"]]
    assert [len(choice["logprobs"]["content"]) for choice in tokens] == [len(choice["provenance"]) for choice in tokens]
    shown = [(entry, origin) for choice in tokens for entry, origin in _pairs(choice)]
    assert [(origin["origin"], origin["step"]) for _, origin in shown] == ORIGINS
    assert bytes(byte for entry, _ in shown for byte in entry["bytes"]) == b"one two three four"
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry, _ in shown)
    assert done == "[DONE]"


def _pairs(choice: dict[str, Any]) -> list[tuple[Any, Any]]:
    return list(zip(choice["logprobs"]["content"], choice["provenance"], strict=True))


def timeline(records: list[Record], query: str = "") -> httpx.Response:
    transport = httpx.ASGITransport(create_app(FakeClient(), INFO, healthy, lambda: records))

    async def inner() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.get(f"/ui/timeline{query}")

    return asyncio.run(inner())


def test_the_timeline_is_what_processes_recorded() -> None:
    plans = [Record("scheduler", "plan", step + 0.5, step + 0.75, step, {"batch": 2}) for step in (7, 8, 9)]
    device = [Record("GPU", "prefill", step + 1.0, step + 2.0, step, {"phase": "decode"}) for step in (7, 8)]
    records = [plans[0], device[0], plans[1], Record("client", "deliver", 8.75, 8.8), plans[2], device[1]]
    shown = timeline(records).json()
    assert shown["now"] == pytest.approx(time.monotonic(), abs=60)
    assert [each[:5] for each in shown["records"]] == [
        ["scheduler", "plan", 7.5, 7.75, 7],
        ["GPU", "prefill", 8.0, 9.0, 7],
        ["scheduler", "plan", 8.5, 8.75, 8],
        ["client", "deliver", 8.75, 8.8, 0],
        ["scheduler", "plan", 9.5, 9.75, 9],
        ["GPU", "prefill", 9.0, 10.0, 8],
    ]
    assert shown["records"][0][5] == {"batch": 2}
    assert timeline(records, "?steps=1").json()["records"] == shown["records"][2:]
    assert timeline([]).json()["records"] == timeline(plans).json()["records"] == []


@pytest.mark.parametrize("steps", ["0", "1001", "-1", "x", "1.5", "", "٣"])
def test_a_number_of_steps_is_checked(steps: str) -> None:
    response = timeline([], f"?steps={steps}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "steps")

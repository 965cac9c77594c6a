"""Models, facts, health, tokenizing, flush, metrics, the key, and errors of routing."""

import asyncio
from dataclasses import dataclass, field

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from support.fake_engine_client import INFO, MAX_LEN, FakeClient, ask, healthy

from overlap_spec.config import ApiKeys
from overlap_spec.entrypoints.http import operations
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.errors import ActorDied
from overlap_spec.messages import READY, DraftState, EngineHealth, EngineState, Stats

SECURED = msgspec.structs.replace(INFO, keys=ApiKeys({"sésame": "one"}))


def test_models() -> None:
    reply = ask(FakeClient(), "GET", "/v1/models").json()
    (card,) = reply["data"]
    assert reply["object"] == "list"
    assert card.pop("created") > 1_700_000_000
    assert card == {
        "id": "tiny",
        "object": "model",
        "owned_by": "overlap-spec",
        "root": "/models/tiny",
        "parent": None,
        "max_model_len": MAX_LEN,
    }
    assert ask(FakeClient(), "GET", "/v1/models/tiny").json()["id"] == "tiny"
    missing = ask(FakeClient(), "GET", "/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_a_model_answers_to_its_aliases() -> None:
    info = msgspec.structs.replace(INFO, aliases=("small", "org/tiny"))
    assert [card["id"] for card in ask(FakeClient(), "GET", "/v1/models", info).json()["data"]] == [
        "tiny",
        "small",
        "org/tiny",
    ]
    assert ask(FakeClient(), "GET", "/v1/models/org/tiny", info).json()["id"] == "org/tiny"
    reply = ask(FakeClient(), "POST", "/v1/completions", info, json={"model": "small", "prompt": "a"})
    assert (reply.status_code, reply.json()["model"]) == (200, "tiny")


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(path: str) -> None:
    reply = ask(FakeClient(), "GET", path).json()
    assert reply["model_path"] == "/models/tiny"
    assert reply["tokenizer_path"] == "/models/tiny-tokenizer"
    assert reply["is_generation"] is True
    assert (reply["model_type"], reply["architectures"]) == ("llama", ["LlamaForCausalLM"])


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_is_flat_and_keeps_the_key_to_itself(path: str) -> None:
    client = FakeClient(statistics=Stats(max_total_tokens=640, gen_throughput=12.5, step_time=0.004, gpu_gap=2e-5))
    response = ask(client, "GET", path)
    reply = response.json()
    assert "secret" not in response.text
    assert (reply["page_size"], reply["num_pages"], reply["nested"]) == (16, 4, {"depth": 2})
    assert (reply["version"], reply["max_total_num_tokens"]) == ("1.2.3", 640)
    (state,) = reply["internal_states"]
    assert state["last_gen_throughput"] == 12.5
    assert (state["step_time"], state["gpu_gap"], state["step_efficiency"]) == (0.004, 2e-5, None)
    assert state["host_time"] == state["host_time_hidden"] == 0.0
    assert state["memory_usage"] == {"token_capacity": 640}
    assert state["effective_max_running_requests_per_dp"] == 4
    assert "avg_spec_accept_length" not in state
    assert all(state[name] == reply[name] for name in state.keys() & reply.keys()), "one value of a setting"


def test_accept_length_counts_from_the_last_flush() -> None:
    async def inner() -> list[float | None]:
        client = FakeClient(statistics=Stats(verify_steps_total=10, committed_tokens_total=25))
        transport = httpx.ASGITransport(create_app(client, INFO, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:

            async def accept_length() -> float | None:
                state = (await http.get("/server_info")).json()["internal_states"][0]
                return state.get("avg_spec_accept_length")

            lengths = [await accept_length()]
            assert (await http.post("/flush_cache")).status_code == 200
            lengths.append(await accept_length())
            client.statistics = Stats(verify_steps_total=14, committed_tokens_total=28)
            lengths.append(await accept_length())
        return lengths

    assert asyncio.run(inner()) == [2.5, None, 0.75]


def test_flush_cache() -> None:
    assert ask(FakeClient(), "POST", "/flush_cache").status_code == 200
    busy = ask(FakeClient(flushable=False), "POST", "/flush_cache")
    assert (busy.status_code, busy.json()["error"]["code"]) == (400, "busy")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_a_get_flushes_with_a_key_alone(method: str, path: str) -> None:
    """A page in a browser can make it send any GET; SGLang's clients send theirs with the key."""
    refused = ask(Unflushable(), method, path)
    assert refused.status_code == 405
    assert method == "HEAD" or refused.json()["error"]["code"] == "method_not_allowed"
    assert ask(FakeClient(), method, path, SECURED, headers={"x-api-key": "sésame".encode()}).status_code == 200


class Unflushable(FakeClient):
    """Nobody may flush its cache."""

    async def flush_cache(self) -> bool:
        raise AssertionError("it was flushed")


def test_tokenize_and_detokenize() -> None:
    def post(path: str, **body: object) -> dict[str, object]:
        reply: dict[str, object] = ask(FakeClient(), "POST", path, json=body).json()
        return reply

    limit = {"max_model_len": MAX_LEN}
    assert post("/tokenize", prompt="ab c") == {"tokens": [1, 2, 1], "count": 3, **limit}
    assert post("/tokenize", prompt="ab c", add_special_tokens=False) == {"tokens": [2, 1], "count": 2, **limit}
    assert post("/tokenize", prompt=["ab", ""]) == {"tokens": [[1, 2], [1]], "count": [2, 1], **limit}
    messages = [{"role": "user", "content": "abc"}]
    assert post("/tokenize", messages=messages, add_special_tokens=False) == {"tokens": [3], "count": 1, **limit}
    assert post("/detokenize", tokens=[1, 7]) == {"text": "7", "prompt": "7"}
    assert post("/detokenize", tokens=[1, 7], skip_special_tokens=False) == {"text": "1 7", "prompt": "1 7"}
    assert post("/detokenize", tokens=[[7], [8]]) == {"text": ["7", "8"], "prompt": ["7", "8"]}
    assert post("/detokenize", tokens=[]) == {"text": "", "prompt": ""}


def test_health_says_what_the_supervisor_says() -> None:
    well = EngineIn(READY).ask("GET", "/health")
    assert (well.status_code, well.json()["state"], "retry-after" in well.headers) == (200, "ready", False)
    for state in EngineState:
        if state is not EngineState.READY:
            health = EngineHealth(state, "no heartbeat", "worker", 12.5, {"worker": 12.5, "scheduler": 0.25})
            ill = EngineIn(health).ask("GET", "/health")
            assert (ill.status_code, ill.headers["retry-after"]) == (503, "1")
            assert ill.json() == {
                "state": state.value,
                "reason": "no heartbeat",
                "actor": "worker",
                "since_s": 12.5,
                "last_sign_s": {"worker": 12.5, "scheduler": 0.25},
                "draft": "unknown",
            }
    dead = EngineIn(replace(READY, draft=DraftState.DEAD)).ask("GET", "/health")
    assert (dead.status_code, dead.json()["draft"]) == (200, "dead"), "no token is wrong"


STOPPING = EngineHealth(EngineState.DRAINING, "the server is shutting down")


def test_requests_wait_for_an_actor_that_is_silent() -> None:
    reply = EngineIn(EngineHealth(EngineState.UNRESPONSIVE, "no heartbeat")).ask("GET", "/v1/models")
    assert reply.status_code == 200


def test_everything_else_is_503_while_the_engine_is_not_ready() -> None:
    state = EngineIn(STOPPING)
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/nowhere")):
        reply = state.ask(method, path)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert reply.json()["error"]["message"] == STOPPING.reason


def test_a_last_scrape_is_answered_while_the_engine_takes_nothing_new() -> None:
    reply = EngineIn(STOPPING).ask("GET", "/metrics")
    assert reply.status_code == 200 and "overlap_spec:num_running_reqs 0.0" in reply.text.splitlines()


def test_health_generate_asks_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    assert ask(client, "GET", "/health_generate").status_code == 200
    ((_, _, sampling),) = client.asked
    assert (sampling.max_new_tokens, sampling.temperature) == (1, 0.0)

    slow = FakeClient(step_s=10)
    monkeypatch.setattr(operations, "PROBE_S", 0.05)
    response = ask(slow, "GET", "/health_generate")
    assert (response.status_code, response.json()["reason"]) == (503, "no token within 0 s")
    assert response.json()["state"] == "unresponsive"
    assert not slow.running


class DeafClient(FakeClient):
    """Whose engine answers no question any more."""

    answers = True

    async def stats(self) -> Stats:
        if not self.answers:
            raise ActorDied("frontend", "no answer")
        return self.statistics


def test_metrics_of_an_engine_that_does_not_answer_are_its_last_ones() -> None:
    client = DeafClient(statistics=Stats(num_running=3))
    engine = EngineIn(EngineHealth(EngineState.UNRESPONSIVE, last_sign_s={"frontend": 12.5}), client)

    async def inner() -> list[str]:
        app = create_app(client, INFO, lambda: engine.health)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            await http.get("/metrics")
            client.answers = False
            return (await http.get("/metrics")).text.splitlines()

    lines = asyncio.run(inner())
    assert "overlap_spec:num_running_reqs 3.0" in lines
    assert 'overlap_spec:last_sign_seconds{process="frontend"} 12.5' in lines


def test_metrics() -> None:
    async def inner() -> list[str]:
        client = FakeClient(statistics=Stats(num_running=3, prompt_tokens_total=7))
        transport = httpx.ASGITransport(create_app(client, INFO, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            await http.post("/v1/completions", json={"prompt": "one two three"})
            await http.post("/v1/completions", json={"prompt": "busy"})
            await http.get("/health")
            response = await http.get("/metrics")
            assert (await http.get("/metrics/")).status_code == 404
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return response.text.splitlines()

    lines = asyncio.run(inner())
    assert "overlap_spec:num_running_reqs 3.0" in lines
    assert "overlap_spec:prompt_tokens_total 7.0" in lines
    assert "overlap_spec:time_to_first_token_seconds_count 1.0" in lines
    assert "overlap_spec:inter_token_latency_seconds_count 2.0" in lines
    assert "overlap_spec:e2e_request_latency_seconds_count 1.0" in lines
    assert 'overlap_spec:http_responses_total{status="200"} 1.0' in lines, "of a request, and none of the probe"
    assert 'overlap_spec:http_responses_total{status="503"} 1.0' in lines


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer", 401),
        ("", 401),
        ("Basic sésame", 401),
        ("sésame", 401),
        ("Bearer sésame", 200),
        ("bearer  sésame", 200),
    ],
)
def test_the_key(header: str | None, status: int) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    reply = ask(FakeClient(), "POST", "/v1/completions", SECURED, json={"prompt": "a"}, headers=headers)
    assert reply.status_code == status
    if status == 401:
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"


SEVERAL = msgspec.structs.replace(INFO, keys=ApiKeys({"ka": "alice", "kb": "bob", "kb2": "bob"}, "ko"))


def status_with(key: str | None, method: str, path: str, info: ServerInfo = SEVERAL, **request: object) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return ask(FakeClient(), method, path, info, headers=headers, **request).status_code


def test_each_of_several_keys_is_a_client() -> None:
    for key, name in {"ka": "key alice", "kb": "key bob", "kb2": "key bob", "ko": "key admin"}.items():
        client = FakeClient()
        assert (
            ask(client, "POST", "/generate", SEVERAL, json={"text": "a"}, headers={"x-api-key": key}).status_code == 200
        )
        assert client.terms[0].client == name
    assert status_with("kc", "GET", "/v1/models") == 401
    alone = FakeClient()
    ask(alone, "POST", "/generate", SECURED, json={"text": "a"}, headers={"x-api-key": "sésame".encode()})
    assert alone.terms[0].client == "address 127.0.0.1", "one key tells no clients apart"


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_what_concerns_all_clients_needs_the_operators_key(path: str) -> None:
    assert [status_with(key, "POST", path) for key in (None, "wrong", "ka", "ko")] == [401, 401, 403, 200]
    assert [status_with(key, "GET", path) for key in (None, "wrong", "ka", "ko")] == [401, 401, 403, 200]
    every, one = {"json": {"abort_all": True}}, {"json": {"rid": "x"}}
    assert [status_with(key, "POST", "/abort_request", **every) for key in (None, "kb", "ko")] == [401, 403, 200]
    assert [status_with(key, "POST", "/abort_request", **one) for key in (None, "kb", "ko")] == [401, 200, 200]
    without = msgspec.structs.replace(SEVERAL, keys=ApiKeys({"ka": "alice"}))
    assert status_with("ka", "POST", path, without) == 200, "there is no such key"
    admin_alone = msgspec.structs.replace(SEVERAL, keys=ApiKeys({}, "ko"))
    assert [status_with(key, "POST", path, admin_alone) for key in (None, "ko")] == [401, 200]
    assert status_with(None, "POST", "/abort_request", admin_alone, **every) == 401
    assert status_with(None, "GET", "/v1/models", admin_alone) == 200
    refused = ask(FakeClient(), "POST", path, SEVERAL, headers={"x-api-key": "ka"})
    assert refused.json()["error"]["code"] == "admin_key_required" and "ko" not in refused.text


@pytest.mark.parametrize("path", ["/audit", "/ui/live", "/ui/timeline"])
def test_what_shows_the_requests_of_all_needs_the_operators_key(path: str) -> None:
    assert [status_with(key, "GET", path) for key in (None, "ka", "ko")] == [401, 403, 200]
    assert status_with("ka", "GET", path, msgspec.structs.replace(SEVERAL, keys=ApiKeys({"ka": "alice"}))) == 200
    for open_to_all in ("/metrics", "/server_info"):  # figures and settings: no ids, no text
        assert status_with("ka", "GET", open_to_all) == 200


@pytest.mark.parametrize("path", ["/flush_cache%0A", "/flush_cache%0D", "/audit%0a", "/ui/live%00", "/v1/models%7F"])
def test_a_path_with_control_characters_is_refused(path: str) -> None:
    """A route's pattern also matches a newline at its end."""
    for method in ("GET", "POST"):
        for key in ("ka", "ko"):
            headers = {"authorization": f"Bearer {key}"}
            refused = ask(Unflushable(), method, path, SEVERAL, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_path")


def test_only_health_needs_no_key() -> None:
    assert ask(FakeClient(), "GET", "/health", SECURED).status_code == 200
    for path in ("/metrics", "/v1/models", "/server_info", "/nowhere", "/health_generate", "/health/"):
        assert ask(FakeClient(), "GET", path, SECURED).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("GET", "/generate", 405, "method_not_allowed"),
        ("PUT", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes_and_methods(method: str, path: str, status: int, code: str) -> None:
    response = ask(FakeClient(), method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert path in response.json()["error"]["message"]


@dataclass
class EngineIn:
    """An engine in a state."""

    health: EngineHealth
    client: FakeClient = field(default_factory=FakeClient)

    def ask(self, method: str, path: str) -> httpx.Response:
        async def inner() -> httpx.Response:
            app = create_app(self.client, INFO, lambda: self.health)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
                return await http.request(method, path)

        return asyncio.run(inner())

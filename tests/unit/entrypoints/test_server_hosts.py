"""By which names a local server may be called, and from which pages: what a browser says in Host and Origin."""

import socket
from typing import Any

import pytest
from msgspec.structs import replace
from support.fake_engine_client import INFO, FakeClient, ask

from overlap_spec.config import ApiKeys, EngineConfig, Machine, ModelFiles
from overlap_spec.config.resolve import resolve
from overlap_spec.entrypoints.http.auth import HostRules, host_rules
from overlap_spec.entrypoints.http.engine_client import _host_rules

LOCAL = replace(INFO, hosts=host_rules((), ()))
OWN = socket.gethostname()
WITHOUT = ApiKeys()
HERE = {"host": "127.0.0.1:30000"}


def status(headers: dict[str, str], info: Any = LOCAL, path: str = "/v1/models") -> int:
    return ask(FakeClient(), "GET", path, info, headers=headers).status_code


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost:30000", "localhost.", "localhost.:1", "a.b.localhost", "127.0.0.1", "127.9.8.7:80"),
        *("[::1]", "[::1]:30000", "[2001:DB8::1]:1", "10.0.0.7:8000", "host.docker.internal:30000", OWN, OWN.upper()),
    ],
)
def test_its_own_names_are_let_in(host: str) -> None:
    assert status({"host": host}) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:30000", "localhost.evil.example", "notlocalhost", "127.0.0.1.evil.example"),
        *("localhost@evil.example", "evil.example@localhost", "localhost:x", "[::1", "[localhost]", "", "127.1"),
        *("localhost, evil.example", "localhost/evil.example", "localhost#evil", "localhost\\evil.example"),
        *("..", "[::1]a"),
    ],
)
def test_other_names_are_refused_with_the_flag(host: str) -> None:
    for method, path, body in (
        ("POST", "/v1/completions", {"json": {"prompt": "a"}}),
        ("POST", "/v1/completions", {"content": b'{"prompt": "a"}', "headers": {"content-type": "text/plain"}}),
        ("POST", "/flush_cache", {}),
        ("GET", "/server_info", {}),
        ("GET", "/ui", {}),
    ):
        headers = {**body.pop("headers", {}), "host": host}
        refused = ask(FakeClient(), method, path, LOCAL, headers=headers, **body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden_host")
        assert "--allowed-hosts" in refused.json()["error"]["message"]


def test_every_one_of_several_hosts_is_looked_at() -> None:
    rules = host_rules((), ())
    good, evil = (b"host", b"localhost"), (b"host", b"evil.example")
    rules.check({"headers": [good, good]})
    rules.check({"headers": []})  # HTTP/1.0: no browser
    for headers in ([good, evil], [evil, good]):
        with pytest.raises(Exception, match="evil.example"):
            rules.check({"headers": headers})


@pytest.mark.parametrize(
    "origin",
    [
        *("http://localhost:3000", "https://localhost", "HTTP://LOCALHOST", "http://127.0.0.1:8080", "http://[::1]:1"),
        *("http://app.localhost:5173", "http://127.0.0.1:30000"),
    ],
)
def test_pages_of_this_machine_may_call(origin: str) -> None:
    assert status({**HERE, "origin": origin}) == 200


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "null", "", "http://localhost.evil.example", "http://evil.example@127.0.0.1"),
        *("http://127.0.0.1@evil.example", "http://6.6.6.6", "http://127.0.0.1.evil.example:30000", "file://"),
        *("chrome-extension://abc", "//localhost", "localhost", "http://localhost/evil", "ftp://localhost"),
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_pages_of_elsewhere_may_not_whatever_their_bodies_are_called(origin: str, kind: str) -> None:
    headers = {**HERE, "origin": origin, "content-type": kind}
    refused = ask(FakeClient(), "POST", "/v1/completions", LOCAL, headers=headers, content=b'{"prompt": "a"}')
    assert refused.status_code == 403 and "--cors-allow-origins" in refused.json()["error"]["message"]
    assert status({**HERE, "origin": origin}) == 403


def test_the_page_works_behind_a_forwarded_port() -> None:
    """`ssh -L 8000:localhost:30000`, on this machine or another one that its neighbours reach by address."""
    for authority in ("localhost:8000", "127.0.0.1:8000", "192.168.1.5:8000", "[::1]:8000"):
        assert status({"host": authority, "origin": f"http://{authority}"}) == 200
    assert status({"host": "192.168.1.5:8000", "origin": "http://192.168.1.5:9000"}) == 403


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_probes_are_answered_under_every_name(path: str) -> None:
    assert status({"host": "evil.example", "origin": "https://evil.example"}, path=path) == 200


def test_flags_let_names_and_origins_in() -> None:
    named = replace(INFO, hosts=host_rules(("Box.LAN", "gpu7"), ("https://page.example",)))
    assert [status({"host": host}, named) for host in ("box.lan:1", "gpu7", "gpu8", OWN)] == [200, 200, 403, 200]
    page = {"host": "box.lan:1", "origin": "http://box.lan:1"}
    assert status(page, named) == 200, "it has served this page itself"
    assert status({**HERE, "origin": "https://page.example"}, named) == 200
    assert status({**HERE, "origin": "https://page.example:8443"}, named) == 403
    every = replace(INFO, hosts=host_rules(("*",), ("*",)))
    assert status({"host": "evil.example", "origin": "null"}, every) == 200
    assert status({"host": "evil.example", "origin": "null"}, replace(INFO, hosts=None)) == 200


def rules_of(keys: ApiKeys = WITHOUT, **flags: Any) -> HostRules | None:
    files = ModelFiles(weights="", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=64, vocab_size=9)
    return _host_rules(resolve(EngineConfig(**flags), files, Machine(2, False), keys)[0].server)


def test_it_holds_on_a_loopback_address_without_a_key_and_where_it_is_asked_for() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        assert rules_of(host=host) is not None
    assert rules_of(host="0.0.0.0") is None and rules_of(host="") is None
    assert rules_of(ApiKeys({"k": "alice"})) is None
    assert rules_of(ApiKeys({}, "operator's")) is not None, "requests without a key are taken"
    asked = rules_of(ApiKeys({"k": "alice"}), host="0.0.0.0", allowed_hosts=("gpu7",), cors_allow_origins=("http://a",))
    assert asked is not None and "gpu7" in asked.hosts and asked.origins == {"http://a"}

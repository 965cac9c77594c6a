"""`/openapi.json` and `/docs` describe what is served; CORS lets in the origins that are named, and no other."""

import json
import re
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route
from support.fake_engine_client import INFO, FakeClient, ask, healthy

from overlap_spec.config import ApiKeys
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.openapi import ENDPOINTS
from overlap_spec.entrypoints.openai.requests import ChatRequest

LOCKED = msgspec.structs.replace(INFO, keys=ApiKeys({"secret": "one"}))
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def document() -> Any:
    return ask(FakeClient(), "GET", "/openapi.json", LOCKED).json()


def test_the_paths_are_the_routes(document: Any) -> None:
    routes = [route for route in create_app(FakeClient(), INFO, healthy).routes if isinstance(route, Route)]
    served = {re.sub(r":\w+}", "}", route.path): (route.methods or set()) - {"HEAD"} for route in routes}
    described = {path: {method.upper() for method in methods} for path, methods in document["paths"].items()}
    assert described == served
    assert set(ENDPOINTS) < set(served)  # the others are of APIs


def test_every_operation_is_described(document: Any) -> None:
    ids = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"].endswith("."), path
            assert operation["responses"]["200"]
            assert ("requestBody" in operation) <= (method == "post")
            ids.append(operation["operationId"])
            in_path = [each["name"] for each in operation.get("parameters", ())]
            assert in_path == re.findall(r"{(\w+)}", path)
    assert len(ids) == len(set(ids))
    # what reads a body has its struct: only these posts have none
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    bare = {path for path in posts if "requestBody" not in document["paths"][path]["post"]}
    assert bare <= {"/ping", "/flush_cache", "/reset_prefix_cache"}


def test_every_reference_and_schema_is_sound(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for name in re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)):
        assert name.removeprefix("#/components/schemas/") in schemas
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    assert set(schemas["ChatRequest"]["properties"]) == set(ChatRequest.__struct_fields__)


def test_a_body_that_is_served_fits_its_schema(document: Any) -> None:
    def errors(path: str, body: Any) -> list[str]:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        whole = {**schema, "components": document["components"]}
        return [error.message for error in Draft202012Validator(whole).iter_errors(body)]

    turns = [{"role": "user", "content": "hi"}]
    for path, good, bad in (
        ("/v1/chat/completions", {"messages": turns}, {}),
        ("/v1/completions", {"prompt": [1, 2], "seed": 3}, {"prompt": "a", "seed": "b"}),
        ("/v1/messages", {"messages": turns, "max_tokens": 3}, {"messages": turns}),
        ("/v1/responses", {"input": "hi"}, {"input": "hi", "store": True}),
        ("/generate", {"text": ["a", "b"], "stream": False}, {"text": 3}),
    ):
        assert errors(path, good) == []
        assert errors(path, bad)
        assert ask(FakeClient(), "POST", path, json=good).status_code == 200
        assert ask(FakeClient(), "POST", path, json=bad).status_code == 400


def test_the_page_loads_nothing_from_elsewhere() -> None:
    reply = ask(FakeClient(), "GET", "/docs", LOCKED)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert "://" not in reply.text and 'src="' not in reply.text
    assert 'fetch("openapi.json")' in reply.text


def test_no_origin_is_let_in_unless_named() -> None:
    for info, origin, allowed in (
        (LOCKED, PAGE, None),
        (msgspec.structs.replace(LOCKED, cors_allow_origins=(PAGE,)), PAGE, PAGE),
        (msgspec.structs.replace(LOCKED, cors_allow_origins=(PAGE,)), "https://other.example", None),
        (msgspec.structs.replace(LOCKED, cors_allow_origins=("*",)), PAGE, "*"),
    ):
        asking = {"origin": origin, "access-control-request-method": "POST"}
        asking["access-control-request-headers"] = "authorization,content-type"
        reply = ask(FakeClient(), "OPTIONS", "/v1/chat/completions", info, headers=asking)
        assert (reply.status_code == 200) == (allowed is not None)
        assert reply.headers.get("access-control-allow-origin") == allowed
        key = {"origin": origin, "authorization": "Bearer secret"}
        reply = ask(FakeClient(), "GET", "/v1/models", info, headers=key)
        assert (reply.status_code, reply.headers.get("access-control-allow-origin")) == (200, allowed)
        assert ask(FakeClient(), "GET", "/v1/models", info, headers={"origin": origin}).status_code == 401

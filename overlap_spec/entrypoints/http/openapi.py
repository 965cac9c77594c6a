"""`GET /openapi.json`: every endpoint, from its route and the struct of its body; `/docs` shows it.

Summaries are the endpoints' docstrings, schemas are msgspec's. Every route is in `ENDPOINTS` or in those of its API
(`app.py`): a test compares them.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from overlap_spec.entrypoints.http.body_fields import UNSUPPORTED, Json
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.operations import AbortRequest, UpdateRequest, as_json
from overlap_spec.entrypoints.http.tokens import DetokenizeRequest, TokenizeRequest
from overlap_spec.entrypoints.openai.replies import MessageChoice, Reply, TextChoice
from overlap_spec.entrypoints.openai.requests import ChatRequest, CompletionRequest
from overlap_spec.messages import EngineHealth

REFS = "#/components/schemas/{name}"
JSON, TEXT, EVENTS, HTML = "application/json", "text/plain", "text/event-stream", "text/html"


class Endpoint(msgspec.Struct, frozen=True):
    """What a route does not tell: the struct of its body, and what it answers with (no media type: no body).

    `inner`: a field of the body that is checked later, and its struct. `takes_unsupported`: other engines' parameters
    may be set to values without an effect. `is_open`: needs no API key.
    """

    body: Any = None
    answer: Any = dict[str, Any]
    media: tuple[str, ...] = (JSON,)
    inner: tuple[str, Any] | None = None
    takes_unsupported: bool = False
    is_open: bool = False


Endpoints = Mapping[str, Endpoint]
STREAMED = (JSON, EVENTS)
ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatRequest, Reply[MessageChoice], STREAMED, takes_unsupported=True),
    "/v1/completions": Endpoint(CompletionRequest, Reply[TextChoice], STREAMED, takes_unsupported=True),
    "/tokenize": Endpoint(TokenizeRequest),
    "/detokenize": Endpoint(DetokenizeRequest),
    "/abort_request": Endpoint(AbortRequest, media=()),
    "/v1/models": Endpoint(),
    "/v1/models/{model_id}": Endpoint(),
    "/version": Endpoint(answer=dict[str, str]),
    "/model_info": Endpoint(),
    "/get_model_info": Endpoint(),
    "/server_info": Endpoint(),
    "/get_server_info": Endpoint(),
    "/audit": Endpoint(),
    "/flush_cache": Endpoint(answer=str, media=(TEXT,)),
    "/reset_prefix_cache": Endpoint(answer=str, media=(TEXT,)),
    "/update_weights_from_disk": Endpoint(UpdateRequest),
    "/health": Endpoint(answer=EngineHealth, is_open=True),
    "/ping": Endpoint(answer=EngineHealth, is_open=True),
    "/health_generate": Endpoint(media=()),
    "/metrics": Endpoint(answer=str, media=(TEXT,)),
    "/openapi.json": Endpoint(is_open=True),
    "/docs": Endpoint(answer=str, media=(HTML,), is_open=True),
}
OPEN_PATHS = frozenset(path for path, endpoint in ENDPOINTS.items() if endpoint.is_open)


class OpenApi:
    """The description of `routes`, and a page that shows it. `endpoints`: what routes do not tell, by path."""

    def __init__(self, routes: Iterable[Route], endpoints: Endpoints, info: ServerInfo) -> None:
        self._routes = [*routes, *self.routes()]
        self._endpoints = endpoints
        self._info = info

    def routes(self) -> list[Route]:
        return [Route("/openapi.json", self.json), Route("/docs", self.page)]

    async def json(self, request: Request) -> Response:
        """Describe every endpoint, as OpenAPI 3.1."""
        return as_json(describe(self._routes, self._endpoints, self._info))

    async def page(self, request: Request) -> Response:
        """Show the description of every endpoint. The page loads nothing from elsewhere."""
        return HTMLResponse(files("overlap_spec").joinpath("data/docs.html").read_text())


def describe(routes: Iterable[Route], endpoints: Endpoints, info: ServerInfo) -> Json:
    """The OpenAPI document."""
    shapes = [each for endpoint in endpoints.values() for each in (endpoint.body, endpoint.answer) if each is not None]
    shapes += [endpoint.inner[1] for endpoint in endpoints.values() if endpoint.inner is not None]
    schemas, components = msgspec.json.schema_components(shapes, ref_template=REFS)
    found = {str(shape): schema for shape, schema in zip(shapes, schemas, strict=True)}
    paths: Json = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        operation = _operation(route, endpoints[path], found)
        methods = sorted((route.methods or set()) - {"HEAD"})
        paths[path] = {method.lower(): {**operation, "operationId": _id(method, path)} for method in methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"overlap-spec, serving {info.model_name}", "version": info.version},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}, "securitySchemes": _SCHEMES},
    }


_ERROR = {
    "type": "object",
    "description": "What is wrong, and the field that is to blame. Below /v1/messages: Anthropic's error.",
    "properties": {"error": {"type": "object"}},
    "required": ["error"],
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _operation(route: Route, endpoint: Endpoint, schemas: dict[str, Json]) -> Json:
    summary, _, more = (inspect.getdoc(route.endpoint) or "").partition("\n")
    content = {media: {"schema": _answer(media, endpoint, schemas)} for media in endpoint.media}
    operation: Json = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer."} | ({"content": content} if content else {}),
            "default": {"description": "An error.", "content": {JSON: {"schema": {"$ref": REFS.format(name="Error")}}}},
        },
        "security": [] if endpoint.is_open else [{"bearer": []}, {"x-api-key": []}, {}],
    }
    description = more.strip() + _refusals(endpoint)
    if description:
        operation["description"] = description
    if endpoint.body is not None:
        content = {JSON: {"schema": _body(endpoint, schemas)}}
        operation["requestBody"] = {"required": True, "content": content}
    names = re.findall(r"{(\w+)", route.path)
    if names:
        operation["parameters"] = [_parameter(name) for name in names]
    return operation


def _answer(media: str, endpoint: Endpoint, schemas: dict[str, Json]) -> Json:
    return schemas[str(endpoint.answer)] if media == JSON else {"type": "string"}


def _body(endpoint: Endpoint, schemas: dict[str, Json]) -> Json:
    """The schema of a body; a field whose inner struct is checked later refers to it."""
    schema = schemas[str(endpoint.body)]
    if endpoint.inner is None:
        return schema
    field, inner = endpoint.inner
    note = f"`{field}` is checked against {schemas[str(inner)]['$ref'].rsplit('/', 1)[-1]}."
    return {"allOf": [schema], "description": note}


def _refusals(endpoint: Endpoint) -> str:
    """The parameters that are refused by name, for the endpoints that take what is theirs."""
    if not endpoint.takes_unsupported:
        return ""
    return "Refused, unless the value has no effect: " + ", ".join(sorted(UNSUPPORTED)) + "."


def _parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])

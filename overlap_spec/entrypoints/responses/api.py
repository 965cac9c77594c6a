"""Attaches the Responses API to the server."""

from starlette.routing import Route

from overlap_spec.entrypoints.http.apis import Api, ApiParts
from overlap_spec.entrypoints.http.openapi import STREAMED, Endpoint
from overlap_spec.entrypoints.responses.endpoint import Responses
from overlap_spec.entrypoints.responses.requests import Items, ResponsesRequest

PATH = "/v1/responses"
ENDPOINTS = {PATH: Endpoint(ResponsesRequest, media=STREAMED, inner=("input", Items))}


def attach(parts: ApiParts) -> Api:
    """Its route."""
    return Api([Route(PATH, Responses(parts.chats, parts.info).post, methods=["POST"])], ENDPOINTS)

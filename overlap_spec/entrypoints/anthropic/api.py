"""Attaches the Messages API to the server."""

from overlap_spec.entrypoints.anthropic.endpoints import Messages
from overlap_spec.entrypoints.anthropic.requests import CountRequest, MessagesRequest
from overlap_spec.entrypoints.http.apis import Api, ApiParts
from overlap_spec.entrypoints.http.openapi import STREAMED, Endpoint

ENDPOINTS = {
    "/v1/messages": Endpoint(MessagesRequest, media=STREAMED),
    "/v1/messages/count_tokens": Endpoint(CountRequest, dict[str, int]),
}


def attach(parts: ApiParts) -> Api:
    """Its routes."""
    return Api(Messages(parts.client, parts.chats, parts.info).routes(), ENDPOINTS)

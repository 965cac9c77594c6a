"""Attaches the page and what it asks for to the server, unless it is switched off."""

from overlap_spec.entrypoints.http.apis import Api, ApiParts
from overlap_spec.entrypoints.http.openapi import HTML, Endpoint
from overlap_spec.entrypoints.ui.live import Live, LiveFigures, LiveTimeline
from overlap_spec.entrypoints.ui.page import OPEN_PATHS, TYPES, UiPage

FILE_TYPES = tuple(dict.fromkeys(media for media in TYPES.values() if media != HTML))
ENDPOINTS = {
    "/ui": Endpoint(answer=str, media=(HTML,), is_open=True),
    "/ui/{name}": Endpoint(answer=str, media=FILE_TYPES, is_open=True),
    "/ui/live": Endpoint(answer=LiveFigures),
    "/ui/timeline": Endpoint(answer=LiveTimeline),
}


def attach(parts: ApiParts) -> Api:
    """Its routes; those of other paths below `/ui` come before its files'."""
    if not parts.info.ui:
        return Api([], {}, OPEN_PATHS)  # not found without a key, too
    live = Live(parts.client, parts.metrics, parts.info, parts.health, parts.watch)
    return Api([*live.routes(), *UiPage().routes()], ENDPOINTS, OPEN_PATHS)

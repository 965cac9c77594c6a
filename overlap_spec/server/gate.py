"""Who may come in, and when: the API key first, then whether the engine takes requests."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from overlap_spec.server.engine_client import EngineHealth
from overlap_spec.server.problems import Problem

OPEN = "/health"  # says by itself whether the engine is well, and needs no key
COUNTS = "/metrics"  # of use to the last moment, and nothing new to do for the engine


class Gate:
    """ASGI middleware. A request that is let in is not ended here, whatever happens to the engine."""

    def __init__(self, app: ASGIApp, api_key: str | None, health: EngineHealth) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._check(scope) if scope["type"] == "http" and scope["path"] != OPEN else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        headers = {"www-authenticate": "Bearer"} if problem.status == 401 else None
        await problem.response(headers)(scope, receive, send)

    def _check(self, scope: Scope) -> Problem | None:
        if not self._may_enter(Headers(scope=scope).get("authorization", "")):
            return Problem(401, "missing or wrong API key: send `Authorization: Bearer KEY`", code="invalid_api_key")
        ok, reason = (True, "") if scope["path"] == COUNTS else self._health()
        return None if ok else Problem(503, reason or "the engine is not ready", code="not_ready")

    def _may_enter(self, authorization: str) -> bool:
        if self._key is None:
            return True
        scheme, _, key = authorization.partition(" ")
        # Starlette decodes headers as latin-1: encoded the same way, the bytes are those that were sent.
        return hmac.compare_digest(key.strip().encode("latin-1"), self._key) and scheme.lower() == "bearer"

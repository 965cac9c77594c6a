"""Who may enter: API keys, the operator's key, and whether the engine takes requests.

Keys are looked up by their digests: how long it takes tells nothing of them, and does not depend on their number.
"""

import hashlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from overlap_spec.config import ApiKeys
from overlap_spec.messages import READY
from overlap_spec.server.access_log import note_reason
from overlap_spec.server.callers import not_admin, note_caller, wrong_key
from overlap_spec.server.engine_client import HealthOf
from overlap_spec.server.openapi import UNCHECKED
from overlap_spec.server.probes import SHALLOW
from overlap_spec.server.problems import Problem
from overlap_spec.server.ui_page import OPEN_PATHS

SHOWING = ("/metrics", *SHALLOW)  # answered until the end: they give the engine no work
OPEN = OPEN_PATHS.union(UNCHECKED)
ADMIN_PATHS = ("/flush_cache", "/reset_prefix_cache")  # what they do, all clients feel
ADMIN = "admin"  # the name of the operator's key


class Gate:
    """ASGI middleware: checks the API key, then whether the engine takes requests. It ends no admitted request."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, health: HealthOf) -> None:
        self._app = app
        self._names = {_digest(key.encode()): name for key, name in keys.names.items()}
        self._open = not keys.names
        self._admin = None if keys.admin is None else _digest(keys.admin.encode())
        self._tells_apart = len(set(keys.names.values())) > 1
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._check(scope) if scope["type"] == "http" and scope["path"] not in OPEN else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        note_reason(scope, str(problem))
        headers = {"www-authenticate": "Bearer"} if problem.status == 401 else None
        await problem.response(scope["path"], headers)(scope, receive, send)

    def _check(self, scope: Scope) -> Problem | None:
        name = self._name_of(Headers(scope=scope))
        is_admin = self._admin is None or name == ADMIN
        if name is None or (scope["path"] in ADMIN_PATHS and not is_admin):
            return not_admin() if name else wrong_key()
        state = scope.setdefault("state", {})
        state["is_admin"], state["has_key"] = is_admin, bool(name)
        note_caller(scope, name if self._tells_apart else "")
        health = READY if scope["path"] in SHOWING else self._health()
        if health.takes_requests:
            return None
        return Problem(503, health.reason or "the engine is not ready", code="not_ready")

    def _name_of(self, headers: Headers) -> str | None:
        """Whose key the request has; "" without a key where none is asked for, None if it may not enter."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        for given in (key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")):
            digest = _digest(given.encode("latin-1"))  # as Starlette decodes headers: the bytes that were sent
            if digest == self._admin:
                return ADMIN
            if digest in self._names:
                return self._names[digest]
        return "" if self._open else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

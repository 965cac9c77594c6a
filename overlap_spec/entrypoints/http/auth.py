"""Who may enter: names of the server, API keys, and whether the engine takes requests. Endpoints ask for the operator.

Keys are looked up by their digests: how long it takes tells nothing of them, and does not depend on their number.
"""

import hashlib
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from overlap_spec.config import OPERATOR, ApiKeys
from overlap_spec.entrypoints.http.access_log import note_reason
from overlap_spec.entrypoints.http.client_identity import Identity, note_identity, wrong_key
from overlap_spec.entrypoints.http.engine_client import HealthOf
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.hosts import HostRules
from overlap_spec.entrypoints.http.openapi import OPEN_PATHS
from overlap_spec.entrypoints.http.probes import SHALLOW
from overlap_spec.messages import READY

SHOWING = ("/metrics", *SHALLOW)  # answered until the end: they give the engine no work
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Auth:
    """ASGI middleware: checks names and API key, then whether the engine takes requests. It ends no admitted request.

    `hosts`: by which names the server may be called; None: by any. Probes are answered under every name: they change
    nothing and tell nothing but the engine's state. `open_paths`: of APIs, which need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        health: HealthOf,
        hosts: HostRules | None = None,
        open_paths: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS.union(open_paths)
        self._names = {_digest(key.encode()): name for key, name in keys.names.items()}
        self._open = not keys.names
        self._admin = None if keys.admin is None else _digest(keys.admin.encode())
        self._tells_apart = len(set(keys.names.values())) > 1
        self._is_shared = not self._tells_apart and keys.admin is None  # all who may enter have the same rights
        self._health = health
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._check(scope)
        except Problem as refused:
            problem = refused
        else:
            await self._app(scope, receive, send)
            return
        note_reason(scope, str(problem))
        headers = {"www-authenticate": "Bearer"} if problem.status == 401 else None
        await problem.response(scope["path"], headers)(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises: Problem if the request may not enter, or not now."""
        path = scope["path"]
        if CONTROL.search(path):
            raise Problem(400, f"the path {path!r} has control characters", code="invalid_path")
        if self._hosts is not None and path not in SHALLOW:
            self._hosts.check(scope)
        if path in self._open_paths:
            return
        note_identity(scope, self._identity(scope))
        health = READY if path in SHOWING else self._health()
        if not health.takes_requests:
            raise Problem(503, health.reason or "the engine is not ready", code="not_ready")

    def _identity(self, scope: Scope) -> Identity:
        """Raises: Problem for a request without a key that is known here."""
        key = self._name_of(Headers(scope=scope))
        if key is None:
            raise wrong_key()
        is_operator = key == OPERATOR
        host = (scope.get("client") or ("-",))[0]
        return Identity(
            key=key,
            client=f"key {key}" if self._tells_apart else f"address {host}",
            is_admin=is_operator or self._admin is None,
            owns=None if is_operator or self._is_shared else key,
        )

    def _name_of(self, headers: Headers) -> str | None:
        """Whose key the request has; "" without a key where none is asked for, None if it may not enter."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        for given in (key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")):
            digest = _digest(given.encode("latin-1"))  # as Starlette decodes headers: the bytes that were sent
            if digest == self._admin:
                return OPERATOR
            if digest in self._names:
                return self._names[digest]
        return "" if self._open else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

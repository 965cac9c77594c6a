"""Who sends a request, and whether it may enter: names of the server, API keys, and whether the engine takes requests.

Keys are looked up by their digests: how long it takes tells nothing of them, and does not depend on their number.

**Names.** A server on the loopback is called by its names only, so no web page of elsewhere drives it. A browser sends
requests of any page to 127.0.0.1; its `Origin` header names the page's site. By DNS rebinding the name of a foreign
site can lead here as well; then that name is the `Host` header. An address in `Host` cannot be rebound.

**Clients** take turns while their requests wait. A client is its API key's name where there are several keys, else the
address that it connects from. With one key, or none, an address is the best that is known.
"""

import hashlib
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from overlap_spec.config import OPERATOR, ApiKeys
from overlap_spec.entrypoints.http.access_log import note_reason
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.messages import READY, EngineHealth

DOCKER_HOST = "host.docker.internal"
LOCAL = "localhost"
AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/?#\s\\]+)(?::\d{1,5})?", re.IGNORECASE)
ANY = "*"


class HostRules(msgspec.Struct, frozen=True):
    """What is let in: the names of the server, and the origins of pages. `*` is any."""

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def check(self, scope: Scope) -> None:
        """Raises: Problem, a 403 that names the flag."""
        hosts = [value.decode("latin-1").strip() for name, value in scope["headers"] if name == b"host"]
        for host in hosts:
            if not self._is_own(host):
                raise _refused(f"the Host {host[:256]!r} is no name of this server", "--allowed-hosts")
        for name, value in scope["headers"]:
            origin = value.decode("latin-1").strip()
            if name == b"origin" and not self._may_call(origin, hosts):
                raise _refused(f"pages of the Origin {origin[:256]!r} may not call this server", "--cors-allow-origins")

    def _is_own(self, host: str) -> bool:
        name = _host_of(host)
        return ANY in self.hosts or (name is not None and (_is_address(name) or _is_local(name) or name in self.hosts))

    def _may_call(self, origin: str, hosts: list[str]) -> bool:
        """A page of this machine, one that this server has served, or one that a flag names."""
        scheme, found, authority = origin.partition("://")
        name = _host_of(authority) if found and scheme.lower() in ("http", "https") else None
        is_local = name is not None and (_is_local(name) or _is_loopback(name))
        is_served = name is not None and authority.lower() in [host.lower() for host in hosts]
        return is_local or is_served or not self.origins.isdisjoint((ANY, origin))


def host_rules(allowed_hosts: tuple[str, ...], origins: tuple[str, ...]) -> HostRules:
    """Those of the flags; this machine's name is always one of the server's."""
    machine = socket.gethostname().lower()
    own = {DOCKER_HOST, machine, machine.partition(".")[0]} - {""}
    return HostRules(frozenset({*own, *(_plain(name) for name in allowed_hosts)}), frozenset(origins))


def _refused(what: str, flag: str) -> Problem:
    return Problem(403, f"{what}; {flag} would let it in", code="forbidden_host")


def _host_of(authority: str) -> str | None:
    """The host of HOST or HOST:PORT, without a dot at its end; None if it is neither."""
    match = AUTHORITY.fullmatch(authority)
    return None if match is None else _plain(match[1])


def _plain(name: str) -> str:
    return name.lower().removesuffix(".").strip("[]")


def _is_local(name: str) -> bool:
    return name == LOCAL or name.endswith(f".{LOCAL}")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends a request.

    `key`: the name of its API key, to which its request ids belong; "" without one. `client`: whose turn it takes.
    `is_admin`: it may do what concerns all clients. `owns`: whose requests it may end, those of one key; None: all.
    """

    key: str = ""
    client: str = ""
    is_admin: bool = False
    owns: str | None = ""


UNKNOWN = Identity()


def note_identity(scope: Scope, identity: Identity) -> None:
    """Keep who has sent this request."""
    scope.setdefault("state", {})["identity"] = identity


def identity_of(request: Request) -> Identity:
    """Who has sent it; UNKNOWN where no key is looked at."""
    identity: Identity = request.scope.get("state", {}).get("identity", UNKNOWN)
    return identity


def check_admin(request: Request) -> None:
    """Raises: Problem unless the request has the operator's key, or there is none."""
    identity = identity_of(request)
    if not identity.is_admin:
        raise not_admin() if identity.key else wrong_key()


def check_change(request: Request) -> None:
    """Raises: Problem unless this may change something for all. A web page can send any GET, but no key with it."""
    check_admin(request)
    if request.scope["method"] != "POST" and not identity_of(request).key:
        text = f"{request.method} {request.url.path}: use POST; without an API key, a GET changes nothing"
        raise Problem(405, text, code="method_not_allowed")


def wrong_key() -> Problem:
    """What a request without a key is told."""
    text = "missing or wrong API key: send `Authorization: Bearer KEY`, or `x-api-key: KEY`"
    return Problem(401, text, code="invalid_api_key")


def not_admin() -> Problem:
    """What a request with another key is told."""
    return Problem(403, "this concerns all clients: it needs the key of --admin-api-key", code="admin_key_required")


SHALLOW = ("/health", "/ping")  # the second is SageMaker's name for it
SHOWING = ("/metrics", *SHALLOW)  # answered until the end: they give the engine no work
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Auth:
    """ASGI middleware: checks names and API key, then whether the engine takes requests. It ends no admitted request.

    `hosts`: by which names the server may be called; None: by any. Probes are answered under every name: they change
    nothing and tell nothing but the engine's state. `open_paths`: those that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        health: Callable[[], EngineHealth],
        hosts: HostRules | None = None,
        open_paths: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._open_paths = frozenset(open_paths)
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

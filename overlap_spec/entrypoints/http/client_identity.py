"""Whose request it is, and what it may do: clients take turns while their requests wait.

A client is its API key's name where there are several keys, else the address that it connects from. With one key, or
none, an address is the best that is known.
"""

from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_runner import Group
from overlap_spec.messages import Terms

G = TypeVar("G", bound=Group)


class Timed(Protocol):
    """A body with time limits."""

    @property
    def timeout(self) -> float | None:
        """Seconds until the end of the answer."""
        ...

    @property
    def first_token_timeout(self) -> float | None:
        """Seconds until its first token."""
        ...


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


def sent_by(request: Request, group: G) -> G:
    """The group, as this client's."""
    identity = identity_of(request)
    terms = msgspec.structs.replace(group.terms, client=identity.client, key=identity.key)
    return msgspec.structs.replace(group, terms=terms)


def time_limits(body: Timed) -> Terms:
    """Raises: RequestError naming the field that is out of range."""
    return Terms(timeout_s=body.timeout, first_token_timeout_s=body.first_token_timeout)


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

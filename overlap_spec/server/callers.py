"""Whose request it is, and what it may do: clients take turns while their requests wait.

A client is its API key's name where there are several keys, else the address that it connects from. With one key, or
none, an address is the best that is known.
"""

from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from overlap_spec.messages import Terms
from overlap_spec.server.problems import Problem
from overlap_spec.server.running import Group

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


def note_caller(scope: Scope, key_name: str) -> None:
    """Keep whose request this is. `key_name`: "" where keys tell nothing."""
    host = (scope.get("client") or ("-",))[0]
    scope.setdefault("state", {})["caller"] = f"key {key_name}" if key_name else f"address {host}"


def sent_by(request: Request, group: G) -> G:
    """The group, as this client's."""
    client = request.scope.get("state", {}).get("caller", "")
    return msgspec.structs.replace(group, terms=msgspec.structs.replace(group.terms, client=client))


def time_limits(body: Timed) -> Terms:
    """Raises: RequestError naming the field that is out of range."""
    return Terms(timeout_s=body.timeout, first_token_timeout_s=body.first_token_timeout)


def check_admin(request: Request) -> None:
    """Raises: Problem unless the request has the operator's key, or there is none."""
    if not request.scope["state"]["is_admin"]:
        raise not_admin() if request.scope["state"]["has_key"] else wrong_key()


def wrong_key() -> Problem:
    """What a request without a key is told."""
    text = "missing or wrong API key: send `Authorization: Bearer KEY`, or `x-api-key: KEY`"
    return Problem(401, text, code="invalid_api_key")


def not_admin() -> Problem:
    """What a request with another key is told."""
    return Problem(403, "this concerns all clients: it needs the key of --admin-api-key", code="admin_key_required")

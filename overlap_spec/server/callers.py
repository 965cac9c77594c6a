"""Whose request it is: clients take turns while their requests wait.

A client is its API key's name where there are several keys, else the address that it connects from. With one key, or
none, an address is the best that is known.
"""

from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from overlap_spec.messages import Terms
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

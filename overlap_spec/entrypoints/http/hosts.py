"""Which names a server on the loopback may be called by, so that no web page of elsewhere drives it.

A browser sends requests of any page to 127.0.0.1; its `Origin` header names the page's site. By DNS rebinding the name
of a foreign site can lead here as well; then that name is the `Host` header. An address in `Host` cannot be rebound.
"""

import ipaddress
import re
import socket

import msgspec
from starlette.types import Scope

from overlap_spec.entrypoints.http.errors import Problem

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
        name = _name_of(host)
        return ANY in self.hosts or (name is not None and (_is_address(name) or _is_local(name) or name in self.hosts))

    def _may_call(self, origin: str, hosts: list[str]) -> bool:
        """A page of this machine, one that this server has served, or one that a flag names."""
        scheme, found, authority = origin.partition("://")
        name = _name_of(authority) if found and scheme.lower() in ("http", "https") else None
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


def _name_of(authority: str) -> str | None:
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

"""Decides whether a request to a server without a key may come from a web page of another site. Pure.

Every program that reaches the loopback address may use such a server, and so may every page in a browser on the machine. A
browser sends what a page cannot change: `Host` (foreign after DNS rebinding), `Origin` (with every POST) and `Sec-Fetch-Site`.
Programs send none of the latter two. Invariants:
- `Host` is checked by its name alone, since tunnels and containers change ports;
- with a key or without, a request names its host once: servers and proxies disagree about which of several counts.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from headgate.errors import BadRequest, Forbidden

_AUTHORITY = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:(?P<port>\d{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_SHOWN = 100
"""Characters of a foreign name that a message quotes."""


@dataclass(frozen=True, slots=True)
class OwnNames:
    """The names of a server, in addition to those of the loopback address."""

    hosts: frozenset[str]
    origins: frozenset[str]
    """`HOST:PORT` of its public URLs: the port is left out where it is the default."""
    remedy: str
    """The user's way to give the server another name, or a key."""

    @classmethod
    def of(cls, hosts: Iterable[str], urls: Sequence[str], remedy: str) -> OwnNames:
        """Return the names of the addresses at which a server listens, and of the URLs by which it is reached."""
        parts = [urlsplit(url) for url in urls]
        names = {host.lower() for host in (*hosts, *(part.hostname or "" for part in parts)) if host}
        origins = {origin for url in urls if (origin := _origin(url)) is not None}
        return cls(frozenset(names), frozenset(origins), remedy)


def check_host(target: bytes, headers: Sequence[tuple[bytes, bytes]], *, required: bool) -> None:
    """Raise BadRequest unless the header Host names the host, once. `required`: the request needs one (HTTP/1.1)."""
    hosts = [value.strip() for name, value in headers if name == b"host"]
    if not target.startswith(b"/") and target != b"*":
        fault = "the request line names a host: send the path alone, and the host in the header Host"
    elif len(hosts) > 1:
        fault = "the request has several headers Host: send one"
    elif hosts == [b""] or (required and not hosts):
        fault = "the request names no host: send its name in the header Host"
    else:
        return
    raise BadRequest(fault, code="invalid_host", param="Host")


def check_web_page(headers: Sequence[tuple[bytes, bytes]], own: OwnNames, *, linked: bool = False) -> None:
    """Raise Forbidden for what only a web page of another site sends.

    `linked`: the path is of a page without data, which links of other sites may open.
    """
    host = b""
    of_pages: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name == b"host":
            host = value
            _check_host(host, own)
        elif name == b"origin" or name == b"sec-fetch-site":
            of_pages.append((name, value))
    for name, value in of_pages:
        if name == b"origin":
            _check_origin(_text(value), _text(host), own)
        elif value.strip().lower() == b"cross-site" and not linked:
            raise _foreign("Sec-Fetch-Site", "cross-site", own)


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip().lower()


@lru_cache(64)  # a client sends one name with every request; a refusal is not kept
def _check_host(value: bytes, own: OwnNames) -> None:
    host = _text(value)
    found = _AUTHORITY.fullmatch(host)
    name = found["name"].strip("[]").removesuffix(".") if found else None
    if name is None or not (name in own.hosts or _is_loopback(name)):
        message = f"Host: {host[:_SHOWN]!r} is not a name of this server, which has no key: {own.remedy}"
        raise Forbidden(message, code="foreign_host")


def _check_origin(origin: str, host: str, own: OwnNames) -> None:
    """Accept the origin that the request itself is sent to, and those of the server's public URLs."""
    place = _origin(origin)
    if place is None or place not in {_place(origin, host), *own.origins}:
        raise _foreign("Origin", origin, own)


def _foreign(header: str, value: str, own: OwnNames) -> Forbidden:
    message = (
        f"{header}: {value[:_SHOWN]}: a web page of another site cannot use this server, which has no key: "
        f"{own.remedy}"
    )
    return Forbidden(message, code="foreign_origin")


def _origin(url: str) -> str | None:
    """Return `HOST:PORT` of a URL without its scheme, which a proxy may have changed; None for `null`."""
    scheme, separator, rest = url.partition("://")
    return _place(scheme, rest.partition("/")[0].lower()) if separator else None


def _place(scheme: str, authority: str) -> str:
    return authority.removesuffix(f":{_DEFAULT_PORTS.get(scheme.partition('://')[0], '')}")


def _is_loopback(name: str) -> bool:
    """Return whether a name means this machine, whatever DNS returns. `0.0.0.0` is what many servers print as their address."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback or address.is_unspecified

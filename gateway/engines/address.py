"""Where engines may be: not where everybody can reach them."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

from gateway.errors import BadRequest
from gateway.settings import is_public, public_engine


async def check_private(url: str) -> None:
    """Raises BadRequest if an engine's host has a public address. A name that is not known now is nobody's."""
    host = urlsplit(url).hostname or ""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return
    if any(is_public(str(address[0])) for *_, address in found):
        raise BadRequest(public_engine(url), code="public_engine", param="url")

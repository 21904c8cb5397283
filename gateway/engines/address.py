"""Checks engines' addresses: they must not be reachable by everybody."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

from gateway.errors import BadRequest
from gateway.sections import is_public, public_engine
from gateway.settings import ConfigError, Settings


async def check_engines(settings: Settings) -> None:
    """Raises ConfigError if an external engine of the configuration has a name of a public address."""
    for name in settings.models:
        engine = settings.engine_of(name)
        for url in engine.places if not engine.allow_public else ():
            try:
                await check_private(url or "")
            except BadRequest as error:
                raise ConfigError(f"[engine]: {error}") from error


async def check_private(url: str) -> None:
    """Raises BadRequest if an engine's host has a public address, or can be none's. A name that is not known now is nobody's."""
    try:
        if (host := urlsplit(url).hostname) is None:
            return
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return
    except ValueError as error:  # not a valid host name, in Unicode or otherwise
        raise BadRequest(
            f"url: no host can have this name ({error})", code="invalid_value", param="url"
        ) from error
    if any(is_public(str(address[0])) for *_, address in found):
        raise BadRequest(public_engine(url), code="public_engine", param="url")

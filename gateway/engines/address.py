"""Checks engines' addresses: they must neither be public nor link-local."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

from gateway.config import refused_place
from gateway.config.settings import ConfigError, Settings
from headgate.errors import BadRequest, invalid


async def check_engines(settings: Settings) -> None:
    """Raise ConfigError if an external engine of the configuration has a name whose address is refused."""
    for name in settings.models:
        engine = settings.engine_of(name)
        try:
            for url in engine.places:
                await check_place(url or "", allow_public=engine.allow_public)
            for url in engine.mirrors:
                await check_place(url, allow_public=True)
        except BadRequest as error:
            raise ConfigError(f"[engine]: {error}") from error


async def check_place(url: str, *, allow_public: bool, param: str = "url") -> None:
    """Raise BadRequest if a host's address is link-local, public (unless allowed), or none that a host can have.

    A name that DNS does not know now passes.
    """
    try:
        if (host := urlsplit(url).hostname) is None:
            return
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return
    except ValueError as error:  # not a valid host name, in Unicode or otherwise
        raise invalid(param, f"no host can have this name ({error})") from error
    for *_, address in found:
        if refused := refused_place(url, str(address[0]), allow_public=allow_public):
            raise BadRequest(f"{param}: {refused[1]}", code=refused[0], param=param)

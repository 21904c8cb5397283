"""One gateway process as a server: where it listens, and how it ends.

On the first SIGTERM or SIGINT the process is no longer ready and takes no new calls; those that run have `[server] shutdown_s` to
finish, streams among them are kept alive. Then the rest receive an error (an event, a 503) and recorded as abandoned, the
services are closed, and the process exits with 0. A second signal ends the waiting, and a start that is not done yet is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import uvicorn

from gateway.api.middleware.drain import Drain
from gateway.config.settings import ConfigError, Settings

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOPBACK = ("127.0.0.1", "localhost")
_LACKING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of an address that a host's name has and this machine lacks: many have no IPv6."""
_CLOSE_S = 5
"""Seconds that connections may take to close once nothing is served any more."""


class Server(uvicorn.Server):
    """Calls `on_listening` once connections are accepted, and ends at a signal. Raise ConfigError if it cannot listen."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    def stop(self) -> None:
        """Stop the server as a signal does."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals; unlike uvicorn, do not end the process by the signal once all is closed."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another process has begun to listen since the sockets were bound
            await self.lifespan.shutdown()
            raise ConfigError(f"cannot listen: {error.strerror or error}") from error
        if self.started:
            self._on_listening()


class GatewayServer(Server):
    """Serves an application that has a `Drain`."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_listening: Callable[[], None],
        drain: Drain,
        end_calls: Callable[[], Awaitable[None]],
        leave: Callable[[], Awaitable[None]],
        *,
        shutdown_s: float,
        shared: bool = False,
    ) -> None:
        """`end_calls` ends whatever runs, `leave` the process's part in its cluster.

        `shared`: other processes listen at the port of the first socket too.
        """
        config.timeout_graceful_shutdown = _CLOSE_S
        super().__init__(config, on_listening)
        self._drain = drain
        self._end_calls = end_calls
        self._leave = leave
        self._shutdown_s = shutdown_s
        self._shared = shared

    def stop(self) -> None:
        if not self.started:  # errors of a start that is given up are noise
            logging.getLogger("uvicorn.error").disabled = True
        super().stop()
        self._drain.begin()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            if not self._drain.stopping:
                raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let calls finish, and end what is left; the rest is uvicorn's."""
        if not self._drain.stopping:  # stopped by something other than a signal
            self._drain.begin()
        if self._shared:  # other processes accept the connections
            port = _port(self.servers[0].sockets[0])
            for server in self.servers:
                if _port(server.sockets[0]) == port:
                    server.close()
        if not await self._drain.ended(self._shutdown_s):
            log.warning("%d calls are ended before they have finished", self._drain.running)
        await self._end_calls()
        self._drain.end()
        await self._leave()
        await super().shutdown(sockets)


def listening(settings: Settings, shared: bool) -> list[socket.socket]:
    """Return the sockets of `[server]`, of `[admin] port`, and of `[cluster] url` where it names another port.

    No client can connect before they are served. `shared`: other processes may listen at the same ports, except the last one.
    Raise ConfigError.
    """
    server = settings.server
    sockets = bound(server.host, server.port, shared)
    if (admin := settings.admin).port is not None:
        sockets += bound(admin.host or server.host, admin.port, shared, "[admin] host and port")
    if settings.cluster.url is not None:
        url = urlsplit(settings.cluster.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        if port != server.port:
            here = "127.0.0.1" if url.hostname in _LOOPBACK else server.host
            sockets += bound(here, port, False, "[cluster] url")
    return sockets


def bound(host: str, port: int, shared: bool, setting: str = "[server] host and port") -> list[socket.socket]:
    """Return a TCP socket for each address of a host, at one port: `localhost` has one of IPv4 and one of IPv6.

    They are bound and do not listen yet. An address that this machine lacks is left out if there is another. Raise ConfigError
    with the address and the setting that names it.
    """
    made: list[socket.socket] = []
    try:
        found = dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        for left, (family, _, _, _, address) in zip(reversed(range(len(found))), found, strict=True):
            address = (address[0], port or (_port(made[0]) if made else 0), *address[2:])
            try:
                made.append(_bound(family, address, shared, alone=len(found) == 1))
            except OSError as error:
                if error.errno not in _LACKING or not (made or left):
                    raise
    except OSError as error:
        for other in made:
            other.close()
        if isinstance(error, socket.gaierror):
            message = f"{setting}: {host!r} is not an address of this machine: {error.strerror}"
            raise ConfigError(message) from error
        way_out = "; end what listens there, or name another port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"{setting}: cannot listen at {host}:{port}: {error.strerror}{way_out}") from error
    return made


def _bound(family: int, address: Any, shared: bool, *, alone: bool) -> socket.socket:
    """`alone`: it is the host's only address: `::` then serves IPv4, too."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6 and not alone:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    made.set_inheritable(False)
    return made


def _port(bound_socket: socket.socket) -> int:
    port: int = bound_socket.getsockname()[1]
    return port

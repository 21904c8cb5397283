"""One gateway process as a server: where it listens, and how it ends.

On the first SIGTERM or SIGINT the process is no longer ready and takes no new calls; those that run have `[server] shutdown_s` to
finish, streams among them are kept alive. Then what is left is told so (an error event, a 503) and recorded as abandoned, the
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
from urllib.parse import urlsplit

import uvicorn

from gateway.api.middleware.drain import Drain
from gateway.settings import ConfigError, Settings

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOPBACK = ("127.0.0.1", "localhost")
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
        """Unlike uvicorn's own, does not end the process by the signal once all is closed."""
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
            if not self._drain.begun:
                raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets calls finish, and ends what is left; the rest is uvicorn's."""
        if not self._drain.begun:  # stopped by something other than a signal
            self._drain.begin()
        if self._shared:  # other processes take the connections
            self.servers[0].close()
        if not await self._drain.ended(self._shutdown_s):
            log.warning("%d calls are ended before they have finished", self._drain.running)
        await self._end_calls()
        self._drain.end()
        await self._leave()
        await super().shutdown(sockets)


def listening(settings: Settings, shared: bool) -> list[socket.socket]:
    """The sockets of `[server]`, of `[admin] port`, and of `[cluster] url` where it names another port.

    Nobody is let in before they are served. `shared`: other processes may listen at the same ports, but for the last one.
    Raises ConfigError.
    """
    server = settings.server
    sockets = [bound(server.host, server.port, shared)]
    if (admin := settings.admin).port is not None:
        sockets.append(bound(admin.host or server.host, admin.port, shared, "[admin] host and port"))
    if settings.cluster.url is not None:
        url = urlsplit(settings.cluster.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        if port != server.port:
            here = "127.0.0.1" if url.hostname in _LOOPBACK else server.host
            sockets.append(bound(here, port, False, "[cluster] url"))
    return sockets


def bound(host: str, port: int, shared: bool, setting: str = "[server] host and port") -> socket.socket:
    """A bound TCP socket that does not listen yet. Raises ConfigError, with the address and the setting that names it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{setting}: {host!r} is no address of this machine: {error.strerror}") from error
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        way_out = "; end what listens there, or name another port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"{setting}: cannot listen at {host}:{port}: {error.strerror}{way_out}") from error
    made.set_inheritable(False)
    return made

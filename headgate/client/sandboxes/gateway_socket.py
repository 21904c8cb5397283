"""The way out of a sandbox: a Unix socket in its own folder, each connection of which is forwarded to the gateway.

Owns the folder, the socket and the connections. Invariant: a client of the socket reaches the gateway's address and no other.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from headgate.client.sandboxes import entrypoint


class GatewaySocket:
    """The socket to one gateway. Open it with `open`, close it with `close`."""

    def __init__(self) -> None:
        self.folder = Path()
        self._server: asyncio.Server | None = None
        self._origin: tuple[str, str] | None = None
        self._to: tuple[str, int, ssl.SSLContext | None] | None = None

    async def open(self) -> None:
        """Make the folder with the socket and the program `entrypoint.py`, which every user can read."""
        self.folder = Path(tempfile.mkdtemp(prefix="headgate-"))
        self.folder.chmod(0o755)
        program, socket = self.folder / "entrypoint.py", self.folder / "gateway.sock"
        shutil.copyfile(entrypoint.__file__, program)
        program.chmod(0o644)
        self._server = await asyncio.start_unix_server(self._connected, socket)
        socket.chmod(0o666)

    def connect_to(self, url: str) -> None:
        """Forward to the gateway of a URL. TLS is added here, since the agent's URL is another."""
        if (origin := urlsplit(url)[:2]) == self._origin:
            return
        parts, self._origin = urlsplit(url), origin
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        self._to = (parts.hostname or "", port, ssl.create_default_context() if secure else None)

    async def close(self) -> None:
        """Close the socket, and remove the folder."""
        if self._server is not None:
            self._server.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._to is None:
                raise ConnectionRefusedError
            host, port, tls = self._to
            far = await asyncio.open_connection(host, port, ssl=tls)
        except OSError:
            writer.close()
            return
        await entrypoint.join(reader, writer, *far)

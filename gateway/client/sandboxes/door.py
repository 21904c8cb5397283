"""The way out of a sandbox: a Unix socket in a folder of its own, each of whose connections is one to the gateway.

Owns the folder, the socket and the connections. Invariant: who opens the socket reaches the gateway's address and no other.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from gateway.client.sandboxes import inside


class Door:
    """The way to one gateway. Open it with `open`, close it with `close`."""

    def __init__(self) -> None:
        self.folder = Path()
        self._server: asyncio.Server | None = None
        self._origin: tuple[str, str] | None = None
        self._to: tuple[str, int, ssl.SSLContext | None] | None = None

    async def open(self) -> None:
        """Makes the folder with the socket `door` and the program `inside.py`, for agents under whatever user."""
        self.folder = Path(tempfile.mkdtemp(prefix="headgate-"))
        self.folder.chmod(0o755)
        program, socket = self.folder / "inside.py", self.folder / "door"
        shutil.copyfile(inside.__file__, program)
        program.chmod(0o644)
        self._server = await asyncio.start_unix_server(self._connected, socket)
        socket.chmod(0o666)

    def lead(self, url: str) -> None:
        """Leads to the gateway of a URL from now on; https is spoken here, since the agent's URL is another."""
        if (origin := urlsplit(url)[:2]) == self._origin:
            return
        parts, self._origin = urlsplit(url), origin
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        self._to = (parts.hostname or "", port, ssl.create_default_context() if secure else None)

    async def close(self) -> None:
        """Closes the socket, and removes the folder."""
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
        await inside.join(reader, writer, *far)

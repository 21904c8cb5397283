"""The program in a sandbox: forward a port of the sandbox's own network to the gateway, and run the agent.

    python entrypoint.py SOCKET COMMAND...

One file and the standard library alone, from Python 3.8 on: whatever Python there is in the sandbox runs it. It ends with the
status of the agent, or 128 and the number of the signal that killed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys

PORT = 8000
"""Free: the network is the sandbox's own."""
_FILES = 4096
_CHUNK = 65536


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Forward between two connections until both directions have ended, or one is cut."""
    try:
        await asyncio.gather(_forward(reader, far_writer), _forward(far_reader, writer))
    except ConnectionError:
        pass
    finally:
        writer.close()
        far_writer.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes in one direction, and then their end."""
    while True:
        chunk = await reader.read(_CHUNK)
        if not chunk:
            break
        writer.write(chunk)
        await writer.drain()
    with contextlib.suppress(OSError):  # the other side may have closed
        if writer.can_write_eof():
            writer.write_eof()


async def _run(socket: str, argv: list[str]) -> int:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.open_unix_connection(socket)
        except OSError:
            writer.close()
            return
        await join(reader, writer, *far)

    server = await asyncio.start_server(connected, "127.0.0.1", PORT)
    try:
        process = await asyncio.create_subprocess_exec(*argv)
    except OSError as error:
        sys.stderr.write(f"cannot start {argv[0]}: {error}\n")
        return 127
    status = await process.wait()
    server.close()
    return status if status >= 0 else 128 - status


def main() -> int:
    """Run the agent, and return its status."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return asyncio.run(_run(sys.argv[1], sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())

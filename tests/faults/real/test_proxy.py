"""A link passes everything on, in order, and its faults do what they should: a crash test without them would prove nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from headgate.processes.ports import free_port
from tests.faults.real.proxy import Link
from tests.harness.waiting import turns, within

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def _linked() -> AsyncIterator[Link]:
    server = await asyncio.start_server(_echo, "127.0.0.1", port := free_port())
    link = Link("test", free_port(), [free_port(), port])  # no process listens at the first
    await link.start()
    try:
        async with within("the test of the proxy ends"):
            yield link
    finally:
        await link.stop()
        server.close()


async def _connected(link: Link) -> Pair:
    """Return a connection that has echoed a byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    writer.write(b"a")
    assert await reader.readexactly(1) == b"a"
    return reader, writer


async def _is_reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    try:
        writer.write(b"?")
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def test_dropped_and_cut_connections_are_reset_and_later_ones_pass_all_bytes() -> None:
    async with _linked() as link:
        dropped = await _connected(link)
        assert link.drop() == 1
        assert await _is_reset(*dropped)
        cut = asyncio.create_task(link.cut(3600))
        await turns(1)
        assert await _is_reset(*await asyncio.open_connection("127.0.0.1", link.port))
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        reader, writer = await _connected(link)
        writer.write(data := bytes(range(256)) * 4096)
        assert await reader.readexactly(len(data)) == data
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


async def test_a_slow_link_delays_bytes_and_keeps_their_order() -> None:
    async with _linked() as link:
        reader, writer = await _connected(link)
        loop = asyncio.get_running_loop()
        link.delay_s, began = 0.3, loop.time()
        for i in range(10):
            writer.write(b"%d" % i)
            await asyncio.sleep(0.01)
        assert await reader.readexactly(1) == b"0"
        assert loop.time() - began >= 0.59  # in both directions
        link.delay_s = 0.0
        writer.write(b"x")
        assert await reader.readexactly(10) == b"123456789x"
        writer.close()

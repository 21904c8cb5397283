"""Links pass everything on, in order, until they are told otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from processes.ports import free_port
from tests.chaos.proxy import Link
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
    link = Link("test", free_port(), [free_port(), port])  # nobody listens at the first
    await link.start()
    try:
        async with within("the test of the proxy is over"):
            yield link
    finally:
        await link.stop()
        server.close()


async def _open(link: Link) -> Pair:
    return await asyncio.open_connection("127.0.0.1", link.port)


async def test_bytes_come_through_in_order_and_targets_that_are_away_are_passed_over() -> None:
    async with _linked() as link:
        for _ in range(4):
            reader, writer = await _open(link)
            sent = bytes(range(256)) * 4096
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()


async def test_dropped_connections_are_reset_and_new_ones_come_through() -> None:
    async with _linked() as link:
        reader, writer = await _open(link)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        assert link.drop() == 1
        with pytest.raises(ConnectionError):
            await _gone(reader, writer)
        reader, writer = await _open(link)
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"
        writer.close()


async def test_a_link_that_is_cut_lets_nobody_through_until_it_is_mended() -> None:
    async with _linked() as link:
        cut = asyncio.create_task(link.cut(3600))
        await turns(1)
        reader, writer = await _open(link)
        with pytest.raises(ConnectionError):
            await _gone(reader, writer)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        reader, writer = await _open(link)
        writer.write(b"c")
        assert await reader.readexactly(1) == b"c"
        writer.close()


async def test_what_a_slow_link_holds_comes_late_and_in_order() -> None:
    async with _linked() as link:
        reader, writer = await _open(link)
        writer.write(b"0")
        assert await reader.readexactly(1) == b"0"
        loop = asyncio.get_running_loop()
        link.delay_s, began = 0.3, loop.time()
        for i in range(10):
            writer.write(b"%d" % i)
            await asyncio.sleep(0.01)
        assert await reader.readexactly(1) == b"0"
        assert loop.time() - began >= 0.59  # there and back
        link.delay_s = 0.0
        writer.write(b"x")
        assert await reader.readexactly(10) == b"123456789x"
        writer.close()


async def _gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Raises what became of a connection; one that was merely closed counts as reset."""
    writer.write(b"?")
    if await reader.read(1) == b"":
        raise ConnectionResetError

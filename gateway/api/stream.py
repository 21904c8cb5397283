"""Responses that notice when the client goes away, streaming or not, and tell the reply that they read, if any. Pure ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, nullcontext

from fastapi import Response
from starlette.types import Receive, Scope, Send

from gateway.api.errors import error_body, error_response
from gateway.errors import GatewayError
from gateway.rollout.reply import Reader

KEEP_ALIVE = b": keep-alive\n\n"
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class WholeAnswer(Response):
    """An answer that takes a while; the work on it is cancelled when the client goes away."""

    def __init__(self, work: Callable[[], Awaitable[Response]], reader: Reader | None = None) -> None:
        super().__init__()
        self._reader = reader
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def answer() -> None:
            await (await self._work())(scope, receive, send)

        await _until_gone(answer, receive, self._reader)


class EventStream(Response):
    """Server-sent events.

    Nothing is sent before the first event, or before a keep-alive is due, so an error until then is a plain error response. A
    later one is sent as an error event, and the stream then ends without its usual end, so that no client takes it for whole.
    """

    def __init__(
        self,
        events: Callable[[], AsyncIterator[bytes]],
        keep_alive_s: float,
        dump: DumpError,
        reader: Reader | None = None,
    ) -> None:
        super().__init__()
        self._reader = reader
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._dump = dump
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def stream() -> None:
            keeper = asyncio.create_task(self._keep_alive(send), name="keep-alive")
            try:
                await self._send_events(send)
            except GatewayError as error:
                keeper.cancel()
                if not self._started:
                    await error_response(error)(scope, receive, send)
                    return
                await self._write(send, b"data: " + self._dump(error_body(error)) + b"\n\n")
            finally:
                keeper.cancel()
                await asyncio.wait({keeper})
            if self._started:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await _until_gone(stream, receive, self._reader)

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events()) as events:  # type: ignore[type-var]
            async for event in events:
                await self._write(send, event)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_s)
            await self._write(send, KEEP_ALIVE)

    async def _write(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        await send({"type": "http.response.body", "body": data, "more_body": True})


DumpError = Callable[[object], bytes]


async def _until_gone(work: Callable[[], Awaitable[None]], receive: Receive, reader: Reader | None) -> None:
    gone = asyncio.create_task(_disconnected(receive), name="watch-client")

    async def respond() -> None:
        await work()
        if reader is not None:
            reader.delivered = not gone.done()

    async with reader or nullcontext():
        task = asyncio.create_task(respond(), name="respond")
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.wait({task, gone})
        if not task.cancelled():
            task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

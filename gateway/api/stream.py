"""Responses that notice when the client disconnects, streaming or not, and then leave the replies that they read. Pure ASGI."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, nullcontext
from typing import Any

import orjson
from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.api.errors import error_body
from gateway.generation.reply import Choices
from headgate.errors import GatewayError

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
Failure = Callable[[GatewayError], bytes]
"""The event that reports how a stream failed: clients raise on it."""


def openai_failure(error: GatewayError) -> bytes:
    """Write an error as clients of chat completions and completions expect it."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"


class PendingResponse(Response):
    """A response that takes a while: JSON, or a response of its own. The work on it is cancelled when the client disconnects."""

    def __init__(
        self,
        work: Callable[[], Awaitable[Response | dict[str, Any]]],
        choices: Choices | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._choices = choices
        self._work = work
        self._response_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:

        async def respond() -> None:
            made = await self._work()
            if not isinstance(made, Response):
                made = Response(orjson.dumps(made), 200, self._response_headers, "application/json")
            await made(scope, receive, send)

        await _until_disconnected(respond, receive, self._choices)


class EventStream(Response):
    """Server-sent events.

    Nothing is sent before the first event or keep-alive, so an earlier error is a plain error response. A later one is an error
    event, and the stream lacks its usual end, so that no client mistakes it for complete.
    """

    def __init__(
        self,
        events: Callable[[], AsyncIterator[bytes]],
        keep_alive_s: float,
        failure: Failure,
        choices: Choices | None = None,
        headers: Mapping[str, str] | None = None,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        """`events` yields whole events, any number at a time."""
        super().__init__()
        self._choices = choices
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._failure = failure
        given = (headers or {}).items()
        self._sse_headers = [*_SSE_HEADERS, *((name.encode(), value.encode()) for name, value in given)]
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:

        async def stream() -> None:
            try:
                await self._send_events(send)
            except Exception as error:
                if not self._started:
                    raise
                await self._write(send, self._failure(_as_gateway_error(error)))
            if self._started:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def received() -> Message:
            while True:
                try:
                    async with asyncio.timeout(self._keep_alive_s):
                        return await receive()
                except TimeoutError:
                    await self._write(send, self._keep_alive)

        await _until_disconnected(stream, received, self._choices)

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events()) as events:  # type: ignore[type-var]
            async for some in events:
                if self._started:
                    await send({"type": "http.response.body", "body": some, "more_body": True})
                else:
                    await self._write(send, some)

    async def _write(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._sse_headers})
        await send({"type": "http.response.body", "body": data, "more_body": True})


def _as_gateway_error(error: Exception) -> GatewayError:
    if isinstance(error, GatewayError):
        return error
    log.exception("a stream failed", exc_info=error)
    return GatewayError("the gateway failed; see its log for the reason", code="internal_error")


async def _until_disconnected(
    work: Callable[[], Awaitable[None]], receive: Receive, choices: Choices | None
) -> None:
    """Do the work; end it when the client disconnects."""
    scope, disconnected, finished = asyncio.timeout(None), False, False

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        if not finished:
            scope.reschedule(0.0)

    async with choices or nullcontext():
        watcher = asyncio.create_task(watch(), name="watch-client")
        try:
            async with scope:
                await work()
                finished = True
            if choices is not None and not disconnected:
                choices.mark_delivered()
        except TimeoutError:
            if not disconnected:
                raise
        finally:
            finished = True
            watcher.cancel()  # the watcher only waits, so its end need not be awaited

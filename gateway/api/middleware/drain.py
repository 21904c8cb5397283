"""Drains a gateway process that is being stopped: it takes no new calls, and running ones may finish.

Owns the count of requests under `/v1` that are being served. Everything else (the admin API, links of other processes) is
served until these have ended, because they may depend on it. Requests that have no response by the deadline get an error. Pure
ASGI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.errors import error_response
from gateway.api.scope import PREFIX
from headgate.errors import NotAccepted, Unavailable, jittered

_CALLS = ("/v1/", PREFIX)
_RETRY_S = 1.0
"""After this long, another process or the next one responds."""


class Drain:
    """The state of stopping, and the requests that still run. One for each application."""

    def __init__(self) -> None:
        self.stopping = False
        self.running = 0
        """Calls that are being served."""
        self.stopped = False
        """True once no request is served any more."""
        self._waiting: set[asyncio.Timeout] = set()
        self._opening: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._cut = asyncio.Event()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Let `begin` cancel this task while it opens the services."""
        self._opening = asyncio.current_task()
        try:
            yield
        finally:
            self._opening = None

    def begin(self) -> None:
        """Refuse new calls from now on; called again, no longer wait for those that run."""
        if self.stopping:
            self._cut.set()
        self.stopping = True
        if self._opening is not None:
            self._opening.cancel()
        if not self.running:
            self._idle.set()

    async def ended(self, timeout_s: float) -> bool:
        """Wait until no call runs, the time is up, or `begin` was called twice. Return whether none runs."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._cut)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self.running

    def end(self) -> None:
        """Stop serving, and respond to the requests that still wait."""
        self.stopped = True
        for scope in self._waiting:
            scope.reschedule(0.0)
        self._waiting.clear()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call that is being served."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            if self.stopping and not self.running:
                self._idle.set()

    @contextmanager
    def waiting(self) -> Iterator[asyncio.Timeout]:
        """Yield the scope in which a request waits for its response to begin; `end` ends it until `response_begun`."""
        scope = asyncio.timeout(None)
        self._waiting.add(scope)
        try:
            yield scope
        finally:
            self._waiting.discard(scope)

    def response_begun(self, scope: asyncio.Timeout) -> None:
        """Record that the response has begun."""
        self._waiting.discard(scope)


def stopping(kind: type[Unavailable] = Unavailable) -> Unavailable:
    """Return the error for requests that come while the process is being stopped, and for calls that did not finish in time."""
    return kind("this gateway process is being stopped", retry_after=jittered(_RETRY_S), code="stopping")


class Draining:
    """Counts calls, and refuses new ones while the process is being stopped."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        drain = self._drain
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"].startswith(_CALLS) and not drain.stopping:
            with drain.call():
                await self._until_over(scope, receive, send)
        elif scope["path"].startswith(_CALLS) or drain.stopped:
            await error_response(stopping(NotAccepted), scope["path"])(scope, receive, _last(send))
        else:
            await self._until_over(scope, receive, send)

    async def _until_over(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            self._drain.response_begun(until)
            await send(message)

        with self._drain.waiting() as until:
            try:
                async with until:
                    await self._app(scope, receive, sending)
            except TimeoutError:
                if started or not until.expired():
                    raise
                await error_response(stopping(), scope["path"])(scope, receive, _last(send))


def _last(send: Send) -> Send:
    """Close the connection, so that the client connects again and may reach another process."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            more = [(b"connection", b"close"), (b"x-should-retry", b"true")]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sending

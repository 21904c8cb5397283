"""Sends a request on to the gateway process that can answer it. Pure ASGI, around everything else.

What only the coordinator can do (the admin API, calls under agents' keys) goes to the coordinator; a retry whose call runs in
another process (`Elsewhere`) goes there. A request is sent on once at most: whoever gets one that was sent on answers it or says
that it cannot. Nothing is sent twice that may have been done: if the other process goes away before it answers, the client hears
that nobody knows. What a process says that it has not begun (`NotBegun`: it is being stopped, or coordinates no more) waits for
its successor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import aiohttp
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from gateway.api import cluster
from gateway.api.context import credentials
from gateway.api.errors import NOT_BEGUN, error_response
from gateway.errors import Elsewhere, NotBegun, Unavailable
from gateway.keys import Keyring

log = logging.getLogger(__name__)

_MARK = b"x-headgate-forwarded"
_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"host", _MARK,
}  # fmt: skip
_PLACED = ("/v1/", "/e/", "/admin/")
_AGAIN_S = 0.2
_LOOK_S = 1.0
"""How often it is looked whether the other process is still there."""
Alive = Callable[[], Awaitable[bool]]


class Place(Protocol):
    """Where this process stands in its cluster."""

    url: str
    """The coordinator's, while this process follows one."""

    async def coordinator(self) -> str | None:
        """The coordinator's URL; None: it is this process. Waits while there is none; raises Unavailable in the end."""
        ...


def is_coordinators(scope: Scope, agents: Keyring[str]) -> bool:
    """Whether only the coordinator can answer a request."""
    if scope["path"].startswith("/admin/"):
        return bool(scope["path"] != cluster.PATH)
    return bool(agents) and bool(agents.find(credentials(Request(scope))))


@dataclass(slots=True)
class _Sent:
    """A request that may have to be sent on after it was read here, or sent on before."""

    receive: Receive
    limit: int
    """What is over it is nobody's to answer, and is not kept."""
    body: list[bytes] = field(default_factory=list)
    size: int = 0
    whole: bool = False
    started: bool = False

    @property
    def kept(self) -> bool:
        """Whether all that was read is still known."""
        return self.size <= self.limit

    async def recording(self) -> Message:
        """The next message, remembered."""
        message = await self.receive()
        if message["type"] == "http.request":
            self.body.append(message.get("body", b""))
            self.size += len(self.body[-1])
            if not self.kept:
                self.body.clear()
            self.whole = not message.get("more_body", False)
        return message

    def again(self) -> Receive:
        """The request from its beginning, for whoever is to answer it here."""
        known = list(self.body)

        async def receive() -> Message:
            if not known:
                return await self.recording()
            part = known.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(known) or not self.whole}

        return receive

    async def rest(self) -> AsyncIterator[bytes]:
        """The body from its beginning."""
        for part in self.body:
            yield part
        while not self.whole:
            message = await self.recording()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            yield message.get("body", b"")


class Forward:
    """The outermost middleware of a process in a cluster."""

    def __init__(
        self,
        app: ASGIApp,
        place: Callable[[], Place],
        agents: Keyring[str],
        key: str,
        wait_s: float,
        limit: int,
    ) -> None:
        """`place` is asked for once the application has started. `key`: the cluster's. `limit`: of a body, in bytes.

        `wait_s`: how long a coordinator that takes nothing any more is waited for to be succeeded.
        """
        self._app = app
        self._place = place
        self._agents = agents
        self._key = key
        self._keys = Keyring([(key, True)])
        self._wait_s = wait_s
        self._limit = limit
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                if self._session is not None:
                    await self._session.close()
            return
        if scope["type"] != "http" or not scope["path"].startswith(_PLACED):
            await self._app(scope, receive, send)
            return
        try:
            await self._answer(scope, receive, send)
        except Unavailable as error:
            await error_response(error, scope["path"])(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        forwarded = self._was_forwarded(scope)
        sent = _Sent(receive, self._limit)
        if is_coordinators(scope, self._agents):
            if not await self._is_own(scope, sent, send, forwarded=forwarded):
                return
        elif not scope["path"].startswith("/admin/"):
            await self._place().coordinator()  # before that nobody knows whose keys are whose
        try:
            await self._app(scope, sent.again(), self._noting(sent, send))
        except Elsewhere as elsewhere:
            if sent.started or forwarded:
                raise Unavailable(str(elsewhere), retry_after=1.0, code="elsewhere") from elsewhere
            if not await self._watched(elsewhere.url, scope, sent, send, elsewhere.alive):
                raise Unavailable(
                    "the process that has this call does not answer", retry_after=1.0, code="elsewhere"
                ) from elsewhere

    async def _is_own(self, scope: Scope, sent: _Sent, send: Send, *, forwarded: bool) -> bool:
        """Whether this process is the coordinator; if not, the coordinator has answered. Raises Unavailable."""
        until = asyncio.get_running_loop().time() + self._wait_s
        while (url := await self._place().coordinator()) is not None:
            if forwarded:
                message = "this process is not the coordinator any more"
                raise NotBegun(message, retry_after=1.0, code="no_coordinator")
            if await self._watched(url, scope, sent, send, partial(self._coordinates, url)):
                return False
            if not sent.kept or asyncio.get_running_loop().time() > until:
                message = f"step 'send it on': the coordinator took nothing for {self._wait_s:g} s"
                raise Unavailable(message, retry_after=2.0, code="no_coordinator")
            await asyncio.sleep(_AGAIN_S)
        return True

    def _was_forwarded(self, scope: Scope) -> bool:
        mark = next((value for name, value in scope["headers"] if name == _MARK), b"")
        return bool(self._keys.find(mark))

    @staticmethod
    def _noting(sent: _Sent, send: Send) -> Send:
        async def noting(message: Message) -> None:
            sent.started = True
            await send(message)

        return noting

    async def _coordinates(self, url: str) -> bool:
        return self._place().url == url

    async def _watched(self, url: str, scope: Scope, sent: _Sent, send: Send, alive: Alive) -> bool:
        """See `_send_on`; also raises when the other process counts as gone (it may only sleep) before it has answered."""
        sending = asyncio.create_task(self._send_on(url, scope, sent, send), name="forwarded-request")
        try:
            while not (sent.started or sending.done()):
                await asyncio.wait({sending}, timeout=_LOOK_S)
                if not (sent.started or sending.done() or await alive()):
                    message = (
                        "the process that was to answer is gone; whether it did what was asked is not known"
                    )
                    raise Unavailable(message, retry_after=1.0, code="coordinator_lost")
            return await sending
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.wait({sending})

    async def _send_on(self, url: str, scope: Scope, sent: _Sent, send: Send) -> bool:
        """Whether somebody has taken it; then it is answered."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
                auto_decompress=False,
            )
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope.get("query_string", b"")
        target = url + raw.decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
        headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"] if n not in _HOP]
        headers.append((_MARK.decode(), self._key))
        try:
            async with self._session.request(
                scope["method"],
                URL(target, encoded=True),
                headers=headers,
                data=sent.rest() if scope["method"] not in ("GET", "HEAD", "DELETE") else None,
                allow_redirects=False,
            ) as answer:
                if NOT_BEGUN in answer.headers:
                    return False
                await self._relay(answer, sent, send)
        except aiohttp.ClientConnectorError:
            return False
        except (aiohttp.ClientError, ConnectionResetError) as error:
            if sent.started:
                raise  # the connection breaks off, which is what happened
            message = "the process that was to answer went away; whether it did what was asked is not known"
            raise Unavailable(message, retry_after=1.0, code="coordinator_lost") from error
        return True

    async def _relay(self, answer: aiohttp.ClientResponse, sent: _Sent, send: Send) -> None:
        """The answer as it comes; when the client goes away, the connection to the other process is closed."""
        gone = asyncio.create_task(_disconnected(sent), name="forwarded-client")
        passing = asyncio.create_task(_pass(answer, sent, send), name="forwarded-answer")
        try:
            await asyncio.wait({gone, passing}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
            else:
                answer.close()
        finally:
            for task in (gone, passing):
                task.cancel()
            await asyncio.gather(gone, passing, return_exceptions=True)


async def _disconnected(sent: _Sent) -> None:
    while (await sent.receive())["type"] != "http.disconnect":
        pass


async def _pass(answer: aiohttp.ClientResponse, sent: _Sent, send: Send) -> None:
    headers = [(n.lower(), v) for n, v in answer.raw_headers if n.lower() not in _HOP]
    sent.started = True
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    async for part in answer.content.iter_any():
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})

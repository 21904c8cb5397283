"""Forwards requests that another gateway process must serve. Pure ASGI, around everything but the limit of bodies.

Requests that only the coordinator can serve (the admin API, calls under agents' keys) go to the coordinator; a retry whose call
runs in another process (`OwnedByPeer`) goes to that process. Invariants:
- a request is forwarded only after its key was checked here and its whole body has arrived;
- a request is forwarded at most once: the process that gets it serves it or refuses it;
- nothing that may have been done is sent twice. If the other process dies before it responds, the client gets an error that
  states that the outcome is unknown. A request that the other process has not begun (`NotAccepted`: it is stopping, or no
  longer the coordinator) waits for the next one;
- if the client leaves, its request is not forwarded, or the other process sees its connection close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.access import reached
from gateway.api.admin import cluster, events
from gateway.api.context import credentials
from gateway.api.errors import error_response
from gateway.api.middleware.episode_prefix import split
from gateway.api.middleware.hop import Hop, was_forwarded
from gateway.api.scope import PREFIX
from gateway.tenancy.projects import Projects
from headgate.errors import GatewayError, NotAccepted, OwnedByPeer, Unavailable
from headgate.keys import Keyring

_PLACED = ("/v1/", PREFIX, "/admin/")
_EVERYBODYS = (cluster.PATH, events.PATH)
"""Paths of the admin API that each process serves itself, whether or not there is a coordinator."""
_RETRY_S = 0.2
_LOOK_S = 1.0
"""The interval at which the other process is checked for signs of life."""
Alive = Callable[[], Awaitable[bool]]


class CoordinatorRef(Protocol):
    """This process's position in its cluster."""

    url: str
    """The coordinator's, while this process follows one."""

    async def coordinator(self) -> str | None:
        """Return the coordinator's URL; None: it is this process. Wait while there is none; raise Unavailable in the end."""
        ...


class BufferedRequest:
    """A request whose body is kept, so that it can be served here, be sent on, and be sent on again."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.response_begun = False
        """True once the response has begun."""
        self._receive = receive
        self._send = send
        self._parts: list[bytes] = []
        self._whole = False

    async def body(self) -> bytes:
        """Read the whole body. Raise ClientDisconnect if it does not come, and BadRequest if it is over the limit."""
        while not self._whole:
            if (await self._next())["type"] == "http.disconnect":
                raise ClientDisconnect
        return b"".join(self._parts)

    async def left(self) -> None:
        """Wait until the client has disconnected. The whole body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def replay(self) -> Receive:
        """Receive the request from its beginning."""
        known = list(self._parts)

        async def receive() -> Message:
            if not known:
                return await self._next()
            part = known.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(known) or not self._whole}

        return receive

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        self.response_begun = True
        await self._send(message)

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._parts.append(message.get("body", b""))
            self._whole = not message.get("more_body", False)
        return message


class Forward:
    """Handle what this process can serve, and forward the rest."""

    def __init__(
        self,
        app: ASGIApp,
        place: Callable[[], CoordinatorRef],
        agents: Keyring[str],
        projects: Projects,
        key: str,
        wait_s: float,
    ) -> None:
        """`place` is called once the application has started. `projects` know the admin keys. `key`: the cluster's.

        `wait_s`: how long to wait for a successor of a coordinator that takes no requests.
        """
        self._app = app
        self._place = place
        self._agents = agents
        self._projects = projects
        self._cluster = Keyring([(key, True)])
        self._hop = Hop(key)
        self._wait_s = wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self.close()
            return
        if scope["type"] != "http" or not scope["path"].startswith(_PLACED):
            await self._app(scope, receive, send)
            return
        try:
            await self._route(BufferedRequest(scope, receive, send))
        except ClientDisconnect:
            return
        except GatewayError as error:
            await error_response(error, scope["path"])(scope, receive, send)

    async def close(self) -> None:
        """End the connections to other processes."""
        await self._hop.close()

    async def _route(self, request: BufferedRequest) -> None:
        forwarded, path = was_forwarded(request.scope, self._cluster), split(request.scope["path"])[1]
        if self._is_coordinators(path, Request(request.scope)):
            if await self._coordinator_serves(request, forwarded=forwarded):
                return
        elif path not in _EVERYBODYS:
            await self._place().coordinator()  # without a coordinator no key can be resolved
        try:
            await self._app(request.scope, request.replay(), request.send)
        except OwnedByPeer as elsewhere:
            if request.response_begun or forwarded:
                raise Unavailable(str(elsewhere), retry_after=1.0, code="elsewhere") from elsewhere
            if not await self._serves(elsewhere.url, request, elsewhere.alive):
                raise Unavailable(
                    "the gateway process that runs this call does not respond",
                    retry_after=1.0,
                    code="elsewhere",
                ) from elsewhere

    def _is_coordinators(self, path: str, request: Request) -> bool:
        """Return true if only the coordinator can serve a request: to the admin API, or under an agent's key.

        Raise NotAuthenticated if a request to the admin API has no valid key.
        """
        if path.startswith("/admin/"):
            reached(self._projects, request)
            return path not in _EVERYBODYS
        return bool(self._agents) and self._agents.find(credentials(request)) is not None

    async def _coordinator_serves(self, request: BufferedRequest, *, forwarded: bool) -> bool:
        """Forward a request to the coordinator; return False if this process is the coordinator. Raise Unavailable and
        ClientDisconnect."""
        until = asyncio.get_running_loop().time() + self._wait_s
        while (url := await self._place().coordinator()) is not None:
            if forwarded:
                message = "this process is not the coordinator any more"
                raise NotAccepted(message, retry_after=1.0, code="no_coordinator")
            if await self._serves(url, request, partial(self._coordinates, url)):
                return True
            if asyncio.get_running_loop().time() > until:
                message = (
                    f"step 'forward the request': the coordinator accepted nothing for {self._wait_s:g} s"
                )
                raise Unavailable(message, retry_after=2.0, code="no_coordinator")
            await asyncio.sleep(_RETRY_S)
        return False

    async def _coordinates(self, url: str) -> bool:
        return self._place().url == url

    async def _serves(self, url: str, request: BufferedRequest, alive: Alive) -> bool:
        """Send a request to the process at `url`; return whether that process took it and served it.

        Raise ClientDisconnect, and Unavailable if that process counts as gone before it has responded (it may only be suspended).
        """
        body = await request.body()
        leaving = asyncio.create_task(request.left(), name="forwarded-client")
        await asyncio.sleep(0)  # lets a disconnect be noticed before anything is sent
        work = self._hop.send(url, request.scope, body, request.send)
        sending = asyncio.create_task(work, name="forwarded-request")
        try:
            while not sending.done():
                if leaving.done():
                    raise ClientDisconnect
                look_s = None if request.response_begun else _LOOK_S
                await asyncio.wait({sending, leaving}, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
                if not (sending.done() or request.response_begun or await alive()):
                    message = "the process that handled the request died; it is not known whether it carried out the request"
                    raise Unavailable(message, retry_after=1.0, code="coordinator_lost")
            return sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.wait({sending, leaving})

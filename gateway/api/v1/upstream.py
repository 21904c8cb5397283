"""Passes a request on to an upstream model, and its response back as it comes.

Invariants: the client gets the upstream's status, streamed or not; a stream is relayed in whole events, since the gateway writes
keep-alives between them; the end of a response (the whole body, `[DONE]` or an error) is sent only after the exchange is
committed; a response that broke off never ends like a complete one.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from gateway.api.context import Services
from gateway.api.stream import EventStream, PendingResponse, openai_failure
from gateway.api.v1.admission import EPISODE_HEADER
from gateway.dialects.responses_output import error_event
from gateway.episodes.callers import Caller
from gateway.episodes.open_episode import OpenEpisode
from gateway.generation.upstream_call import UpstreamCall
from headgate.errors import GatewayError

if TYPE_CHECKING:
    import httpx

    from gateway.generation.upstream import Upstream

_EVENTS = "text/event-stream"
_PASSED = ("retry-after", "retry-after-ms", "x-should-retry")
"""Headers that direct a client's next request."""
_DONE = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
_FINISHED = re.compile(rb'"finish_reason": ?"')
"""Not every API sends `[DONE]`."""
_ENDING = rb'(?:event: ?|data: ?\{\s*"type": ?")(?:response\.(?:completed|incomplete|failed)|error)\b'
_RESPONDED = re.compile(rb"^" + _ENDING, re.MULTILINE)
"""Streams of responses end with one of these events."""
_RESPONDED_OR_DONE = re.compile(rb"^(?:" + _ENDING + rb"|data: ?\[DONE\])", re.MULTILINE)
"""`[DONE]` means nothing there, but clients stop reading at it."""


async def relay(
    gateway: Services, caller: Caller, model: Upstream, path: str, body: dict[str, Any]
) -> Response:
    """Return the upstream's own response."""
    if caller.episode is not None:
        episode = await gateway.callers.still_open(caller.episode, caller.attempt)
    else:
        episode = await gateway.agents.standalone(caller)
    call = UpstreamCall(f"upstream-{secrets.token_hex(12)}", episode.id, path, body, time.time())

    async def upstream() -> Response:
        return Relay(model, episode, call)

    return PendingResponse(upstream)


class Relay(Response):
    """The response to one call."""

    def __init__(self, model: Upstream, episode: OpenEpisode, call: UpstreamCall) -> None:
        super().__init__()
        self._model = model
        self._episode = episode
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model, call = self._model, self._call
        self._episode.calls.add(call)
        try:
            async with model.request(call) as upstream:
                streamed = upstream.is_success and upstream.headers.get("content-type", "").startswith(
                    _EVENTS
                )
                response = self._stream(upstream) if streamed else await self._whole(upstream)
                await response(scope, receive, send)
        finally:
            self._episode.calls.discard(call)
            if call.parts:  # finish recording, even while the request is being cancelled
                await asyncio.shield(asyncio.ensure_future(model.record(call)))

    async def _whole(self, upstream: httpx.Response) -> Response:
        content = b"".join([part async for part in self._model.read(self._call, upstream)])
        self._call.finish("upstream" if upstream.is_success else "error")
        await self._model.record(self._call)
        headers = {name: upstream.headers[name] for name in _PASSED if name in upstream.headers}
        headers[EPISODE_HEADER] = self._episode.id
        kind = upstream.headers.get("content-type", "application/json")
        return Response(self._model.hidden(content), upstream.status_code, {**headers, "content-type": kind})

    def _stream(self, upstream: httpx.Response) -> Response:
        failure = error_event if self._call.api == "responses" else openai_failure
        whose = {EPISODE_HEADER: self._episode.id}
        return EventStream(lambda: self._events(upstream), self._model.keep_alive_s, failure, headers=whose)

    async def _events(self, upstream: httpx.Response) -> AsyncIterator[bytes]:
        responses = self._call.api == "responses"
        last, end = (_RESPONDED_OR_DONE, _RESPONDED) if responses else (_DONE, _DONE)
        pending, finished = b"", False
        try:
            async with aclosing(self._model.read(self._call, upstream)) as parts:  # type: ignore[type-var]
                async for part in parts:
                    pending += part
                    length = _deliverable(pending, last)
                    events, pending = pending[:length], pending[length:]
                    finished = finished or (not responses and _FINISHED.search(events) is not None)
                    if events:
                        yield self._model.hidden(events)
            if not finished and not end.search(pending):
                raise self._model.broken(self._call)
        except GatewayError:
            await self._model.record(self._call)  # the error is the last thing that the client receives
            raise
        self._call.finish("upstream")
        await self._model.record(self._call)
        if pending:
            yield self._model.hidden(pending)


def _deliverable(data: bytes, last: re.Pattern[bytes]) -> int:
    """Return the length of the whole events in `data` before the last one."""
    done = last.search(data)
    end = done.start() if done else len(data)
    plain, dos = data.rfind(b"\n\n", 0, end), data.rfind(b"\n\r\n", 0, end)
    return max(plain + 2 if plain >= 0 else 0, dos + 3 if dos >= 0 else 0)

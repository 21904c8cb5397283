"""Bodies of requests: how large they may be, and what a client hears that was never asked for its body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.errors import error_response
from gateway.errors import BadRequest


class BodyLimit:
    """Refuses bodies over a limit before anything parses them. Pure ASGI.

    A client that waits to be asked for its body (`Expect: 100-continue`) and is answered instead may send it or not, and the next
    bytes on its connection may be either: so that connection is closed.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        size, asked = 0, b"expect" not in headers

        async def limited() -> Message:
            nonlocal size, asked
            asked = True
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise self._refusal()
            return message

        async def closing(message: Message) -> None:
            if not asked and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        answer = send if asked else closing
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit:
            await error_response(self._refusal(), scope["path"])(scope, receive, answer)
            return
        await self._app(scope, limited, answer)

    def _refusal(self) -> BadRequest:
        message = f"the body is over {self._limit} bytes ([server] body_limit_bytes)"
        return BadRequest(message, code="body_too_large")

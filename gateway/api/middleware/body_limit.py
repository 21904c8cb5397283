"""Bounds the size of request bodies, and closes connections on which the end of a body is ambiguous."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.errors import error_response
from headgate.errors import BadRequest


class BodyLimit:
    """Refuses bodies over a limit before they are parsed. Pure ASGI.

    Closes the connections of two kinds of requests after the response, because their bodies could be taken for the next request:
    - the client waits for permission to send its body (`Expect: 100-continue`), gets a response, and may or may not send it;
    - the client requests another protocol (`Upgrade`), and uvicorn's parser takes the head for the whole request.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:  # a list may be spread over several headers of the same name
            headers[name] = headers[name] + b"," + value if name in headers else value
        size, upgrades, awaited = 0, b"upgrade" in headers, b"expect" in headers

        async def limited() -> Message:
            nonlocal size, awaited
            awaited = False
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise self._refusal()
            return message

        async def closing(message: Message) -> None:
            if (upgrades or awaited) and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        response = closing if upgrades or awaited else send
        if refusal := self._refused(headers):
            await error_response(refusal, scope["path"])(scope, receive, response)
            return
        await self._app(scope, limited, response)

    def _refused(self, headers: dict[bytes, bytes]) -> BadRequest | None:
        """Return why a body is refused, judging by the request's head; None if it is accepted."""
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit:
            return self._refusal()
        if b"upgrade" in headers and (declared != b"0" or b"transfer-encoding" in headers):
            message = (
                "a request with a body cannot request another protocol (`Upgrade`): send it as HTTP/1.1 alone"
            )
            return BadRequest(message, code="upgrade_with_body")
        if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
            return _encoded()
        if headers.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
            message = "Transfer-Encoding: only `chunked` is implemented: send the body without another coding"
            return BadRequest(message, code="unknown_transfer_coding", param="Transfer-Encoding", status=501)
        return None

    def _refusal(self) -> BadRequest:
        message = f"the body is over {self._limit} bytes ([server] body_limit_bytes)"
        return BadRequest(message, code="body_too_large")


def _encoded() -> BadRequest:
    message = "Content-Encoding: compressed bodies are not read: send the body as it is"
    headers = {"accept-encoding": "identity"}
    return BadRequest(message, code="encoded_body", param="Content-Encoding", status=415, headers=headers)

"""A connection of a client: uvicorn's HTTP protocol, with bounds on what a client may send and how long that may take.

Invariants:
- the head of a request has at most `_HEAD_BYTES` and `_HEADERS`, and names one host (`web_pages.check_host`);
- a request arrives whole within `window_s`, or brings `_LEAST_BYTES` in each; a silent connection is closed after
  uvicorn's keep-alive time;
- a client that closes its sending side behind its request gets its response. One that closed both sides looks the same, so it is
  sent interim responses (`102`) until the response begins: these fail if the client has left;
- a response to HTTP/1.0 has no chunks: it ends where the connection ends.

Almost every request arrives in one piece and then costs no timer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.api.errors import error_body
from headgate.errors import BadRequest
from headgate.web_pages import check_host

_HEAD_BYTES = 64 * 1024
_HEADERS = 512
_LEAST_BYTES = 256 * 1024
_INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
_FIRST_S, _MOST_S = 0.1, 5.0
"""Seconds between interim responses: twice as long each time."""


class Connection(HttpToolsProtocol):
    """One connection. Its state is the part of a request that is arriving."""

    window_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._in_body = False
        self._first_bytes = 0
        """Bytes of the piece in which the head began; it may hold the end of another request, too."""
        self._head_bytes = 0
        """Bytes that arrived behind that piece, while the head was not complete."""
        self._piece = 0
        """Bytes of the piece that is being read."""
        self._arrived = 0
        """Bytes since the window began."""
        self._window: asyncio.TimerHandle | None = None
        self._refusal: BadRequest | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_window()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._piece = len(data)
        if self._in_head:
            self._head_bytes += self._piece
        if self._window is not None:
            self._arrived += self._piece
        super().data_received(data)
        if self._in_head or self._in_body:
            self._wait_for_more()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._first_bytes, self._head_bytes = self._piece, 0

    def on_headers_complete(self) -> None:
        if len(self.headers) > _HEADERS or (
            self._first_bytes + self._head_bytes > _HEAD_BYTES and self._head_size() > _HEAD_BYTES
        ):
            self._refusal = _head_too_large()
            raise self._refusal
        try:
            check_host(self.url, self.headers, required=self.parser.get_http_version() == "1.1")
        except BadRequest as error:
            self._refusal = error
            raise
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._window is not None:
            self._end_window()
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True if the client may still read the response to a whole request that has not begun."""
        cycle = self.cycle
        if self._in_head or self._in_body or self.pipeline or cycle is None or cycle.response_started:
            return False
        # HTTP/1.0 knows no interim responses, and that a client or a proxy has left must be noticed.
        if cycle.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        self._probe(cycle, _FIRST_S)
        return True

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or BadRequest(msg, code="invalid_http"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = _unframed(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _probe(self, cycle: RequestResponseCycle, wait_s: float) -> None:
        """Send an interim response now and again until the response begins; the second one fails if the client has left."""
        if not (self.transport.is_closing() or cycle.response_started):
            self.transport.write(_INTERIM)
            self.loop.call_later(wait_s, self._probe, cycle, min(2 * wait_s, _MOST_S))

    def _wait_for_more(self) -> None:
        """Bound what an unfinished request may still send, and the time for it."""
        if self.transport.is_closing():
            self._end_window()
        elif self._in_head and self._head_bytes > _HEAD_BYTES:
            self._refuse(_head_too_large())
        elif self._window is None:
            self._begin_window()

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _begin_window(self) -> None:
        self._arrived = 0
        self._window = self.loop.call_later(self.window_s, self._window_over)

    def _end_window(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None

    def _window_over(self) -> None:
        if self.flow.read_paused or self._arrived >= _LEAST_BYTES:
            self._begin_window()
        elif not self.transport.is_closing():
            message = f"the request did not arrive within {self.window_s:g} s, nor {_LEAST_BYTES} bytes of it"
            self._refuse(BadRequest(message, code="request_too_slow", status=408))

    def _refuse(self, error: BadRequest) -> None:
        """Close the connection, after a response unless it would be taken for a part of another one."""
        self._end_window()
        cycle = self.cycle
        idle = cycle is None or cycle.response_complete
        if idle if self._in_head or not self._in_body else not cycle.response_started:
            body = orjson.dumps(error_body(error))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
        self.transport.close()


def _head_too_large() -> BadRequest:
    message = f"the head of the request is over {_HEAD_BYTES} bytes or {_HEADERS} headers"
    return BadRequest(message, code="head_too_large", status=431)


def _unframed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Return the application with responses of unknown length written as they are, instead of in chunks."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        unframed = False

        async def sending(message: Message) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if unframed:
                    cycle.chunked_encoding = False
            elif unframed:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sending)

    return application

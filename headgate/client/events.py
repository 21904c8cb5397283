"""The client's end of the stream of events (docs/topics/events.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson

from headgate.client.refusal import (
    GatewayRefused,
    NotAGateway,
    refusal,
)


class EventStream:
    """One stream, to be read once with `async for`: objects with `id`, `at`, `kind`, `model`, `data`, and where it is about one
    `episode` and `group`. The kind `gap` names the events that the gateway no longer has.

    It ends when the gateway stops, and a new one can go on after `last`. Raise GatewayRefused, and httpx's errors.
    """

    def __init__(self, http: httpx.AsyncClient, path: str, params: tuple[tuple[str, str], ...]) -> None:
        self._http = http
        self._path = path
        self._params = params
        self.last: int | None = None
        """The id up to which the stream has come; None: it has not begun."""

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        async with self._http.stream("GET", self._path, params=self._params) as response:
            if response.is_error:
                await response.aread()
                raise refusal(response)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise NotAGateway(response)
            rest = b""
            async for some in response.aiter_bytes():
                *blocks, rest = (rest + some).split(b"\n\n")
                for block in blocks:
                    if (event := self._read(block)) is not None:
                        yield event

    def _read(self, block: bytes) -> dict[str, Any] | None:
        """One server-sent event; None if it only gives the id that the stream has reached."""
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
        if b"id" in fields:
            self.last = int(fields[b"id"])
        if b"data" not in fields:
            return None
        data: dict[str, Any] = orjson.loads(fields[b"data"])
        if b"event" not in fields:  # the stream has failed
            error = data["error"]
            raise GatewayRefused(503, error["message"], error["code"], None)
        return data

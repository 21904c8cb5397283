"""The response to a generation: as server-sent events, or whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from fastapi import Response

from gateway.api.context import Services
from gateway.api.stream import KEEP_ALIVE, EventStream, Failure, PendingResponse, openai_failure
from gateway.api.v1.generation import Generation


class Output(Protocol):
    """A dialect's form of a response."""

    async def complete(self) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[bytes]: ...


def respond(
    gateway: Services,
    generation: Generation,
    output: Output,
    stream: bool | None,
    failure: Failure = openai_failure,
    headers: Mapping[str, str] | None = None,
    keep_alive: bytes = KEEP_ALIVE,
) -> Response:
    """Return a dialect's response, as server-sent events or whole. `headers`: in addition to the generation's."""
    headers = {**generation.headers, **(headers or {})}
    if not stream:
        return PendingResponse(output.complete, generation.choices, headers)
    keep_alive_s = gateway.settings.server.keep_alive_s
    return EventStream(output.events, keep_alive_s, failure, generation.choices, headers, keep_alive)

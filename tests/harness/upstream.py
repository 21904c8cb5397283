"""An OpenAI-compatible API of the tests' own, and a gateway before it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.scripted import USER

WORDS = ["Guten", " Tag", ", Welt", "!"]
BODY = {"id": "x-1", "object": "chat.completion", "created": 1, "model": "big-one", "extra": {"kept": True}}
WHOLE = {
    **BODY,
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "".join(WORDS)}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
}


def event(word: str | None) -> bytes:
    """Return a chunk with a word; None: the last."""
    choice = {
        "index": 0,
        "delta": {"content": word} if word else {},
        "finish_reason": None if word else "stop",
    }
    return b"data: " + json.dumps({**BODY, "object": "chat.completion.chunk", "choices": [choice]}).encode()


EVENTS = b"".join(event(word) + b"\n\n" for word in [*WORDS, None]) + b"data: [DONE]\n\n"


async def whole_or_streamed(body: dict[str, Any]) -> Response:
    return events([EVENTS]) if body.get("stream") else JSONResponse(WHOLE)


def events(parts: list[bytes] | AsyncIterator[bytes]) -> Response:
    async def listed() -> AsyncIterator[bytes]:
        for part in parts if isinstance(parts, list) else []:
            yield part

    return StreamingResponse(listed() if isinstance(parts, list) else parts, media_type="text/event-stream")


class Elsewhere:
    """The API: `respond` responds; `requests` is what came, `gone` how many streams lost their reader."""

    def __init__(self) -> None:
        self.respond: Callable[[dict[str, Any]], Awaitable[Response]] = whole_or_streamed
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.gone = 0

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self.handle, methods=["POST"])])

    async def handle(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append((dict(request.headers), body))
        return await self.respond(body)

    async def forever(self, first: bytes) -> AsyncIterator[bytes]:
        """Send some events, and then nothing."""
        try:
            yield first
            await asyncio.Event().wait()
        finally:
            self.gone += 1


@asynccontextmanager
async def behind(model: Path, work: Path, port: int, **overrides: Any) -> AsyncIterator[RunningGateway]:
    """Yield a gateway with the trained model `demo`, and `oracle` at an upstream on `port`."""
    upstream = {"url": f"http://127.0.0.1:{port}/v1/", "model": "big-one", "key": "sk-of-the-admin"}
    given = overrides.pop("upstream", {})
    oracle = {"train": False, "aliases": ["gpt-4o"], "upstream": {**upstream, **given}}
    values = settings_for(model, work, models={"oracle": oracle}, **overrides)
    async with run_gateway(values) as gateway:
        yield gateway


async def call_of(gateway: RunningGateway, episode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the episode's one call, and its exchange."""
    (call,) = (await gateway.admin.episode(episode))["calls"]
    return call, await gateway.admin.exchange(episode, call["id"])


def streaming(gateway: RunningGateway, headers: dict[str, str], **body: Any) -> Any:
    values = {"model": "oracle", "messages": [USER], "stream": True, **body}
    return gateway.http.stream("POST", "/v1/chat/completions", json=values, headers=headers)

"""An admin API of its own, behind a real socket, whose responses a test sets."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from headgate.client.admin import ADMIN, GatewayClient
from tests.harness.waiting import until


class FakeGateway:
    """`refusals` holds the responses to the next requests to open: a status, and a Retry-After in seconds."""

    def __init__(self) -> None:
        self.url = ""
        self.refusals: deque[tuple[int, float]] = deque()
        self.always: tuple[int, float] | None = None
        self.code: str | None = None
        """The code of refusals to open."""
        self.reward_status = 200
        self.taken: dict[str, Any] = {
            "accepted": True,
            "reason": "rewarded",
            "trainable_tokens": 1,
            "notice": "",
        }
        self.opened: list[dict[str, Any]] = []
        self.rewards: dict[str, dict[str, Any]] = {}
        self.abandoned: dict[str, str] = {}
        self.restart_status = 200
        self.restarted: list[str] = []
        self.errors: dict[str, str] = {}
        """The last words of agents whose episodes were abandoned."""
        self.unready = ""
        self.closed: dict[str, str] = {}
        """The reasons of episodes that were closed without their driver."""
        self.closings: asyncio.Queue[str] = asyncio.Queue()
        self.requests: Counter[str] = Counter()
        self.server = uvicorn.Server(uvicorn.Config(self.app(), port=0, log_level="error", lifespan="off"))

    def app(self) -> FastAPI:
        app = FastAPI()
        app.post(ADMIN + "/episodes")(self.open)
        app.post(ADMIN + "/episodes/{episode_id}/reward")(self.reward)
        app.post(ADMIN + "/episodes/{episode_id}/abandon")(self.abandon)
        app.post(ADMIN + "/episodes/{episode_id}/restart")(self.restart)
        app.get("/readyz")(self.ready)
        app.get(ADMIN + "/events")(self.events)
        app.get(ADMIN + "/episodes/{episode_id}")(self.look)
        return app

    async def events(self, wait: float | None = None) -> StreamingResponse:
        async def stream() -> AsyncIterator[bytes]:
            yield b": up to 0\nid: 0\n\n"
            while wait is None:
                episode_id = await self.closings.get()
                event = {
                    "id": 1,
                    "kind": "episode.closed",
                    "episode": episode_id,
                    "data": {"reason": self.closed[episode_id]},
                }
                yield b"id: 1\nevent: episode.closed\ndata: " + json.dumps(event).encode() + b"\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def close(self, episode_id: str, reason: str) -> None:
        """Close an episode without its driver."""
        self.closed[episode_id] = reason
        self.closings.put_nowait(episode_id)

    def die(self) -> None:
        """Break all connections, and listen no more."""
        for listener in self.server.servers:
            listener.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()

    async def look(self, episode_id: str) -> JSONResponse:
        return JSONResponse({"state": "closed", "reason": self.closed[episode_id], "error": ""})

    async def ready(self) -> JSONResponse:
        return _refused(503, 1.0, self.unready) if self.unready else JSONResponse({})

    async def open(self, request: Request) -> JSONResponse:
        self.requests["open"] += 1
        refusal = self.refusals.popleft() if self.refusals else self.always
        if refusal:
            return _refused(*refusal, code=self.code)
        self.opened.append(await request.json())
        episode_id = f"e{len(self.opened)}"
        response = {"episode_id": episode_id, "api_key": f"key-{episode_id}", "base_url": "http://m/v1"}
        return JSONResponse({**response, "version": 0})

    async def reward(self, episode_id: str, request: Request) -> JSONResponse:
        if self.reward_status != 200:
            return _refused(self.reward_status, 0.0)
        assert episode_id not in self.rewards
        self.rewards[episode_id] = await request.json()
        return JSONResponse(self.taken)

    async def restart(self, episode_id: str) -> JSONResponse:
        if self.restart_status != 200:
            return _refused(self.restart_status, 0.0)
        self.restarted.append(episode_id)
        return JSONResponse({"attempt": 1 + self.restarted.count(episode_id)})

    async def abandon(self, episode_id: str, request: Request) -> JSONResponse:
        body = await request.json()
        self.abandoned[episode_id], self.errors[episode_id] = body["reason"], body["error"]
        return JSONResponse({})


def _refused(
    status: int, retry_after: float, message: str = "refused", code: str | None = None
) -> JSONResponse:
    error = {"message": message, "code": code}
    return JSONResponse({"error": error}, status, {"Retry-After": str(retry_after)})


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    fake = FakeGateway()
    server = fake.server
    serving = asyncio.create_task(server.serve(), name="fake-gateway")
    await until(lambda: server.started, "the fake gateway listens")
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield fake
    server.should_exit = True
    await serving


@pytest.fixture
async def client(gateway: FakeGateway) -> AsyncIterator[GatewayClient]:
    async with GatewayClient(gateway.url) as client:
        yield client

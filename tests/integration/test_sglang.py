"""The SGLang adapter before the fake engine: what only SGLang does, and over which an adapter trips."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.engines.base import Engine, GenerateRequest, TokenChunk
from gateway.engines.fake import FakeEngine, create_fake_sglang_app
from gateway.engines.process import connect
from headgate.processes.ports import free_port
from headgate.types import Sampling
from tests.harness.gateways import serve
from tests.harness.waiting import until


@asynccontextmanager
async def sglang(
    fake: FakeEngine, *, incremental: bool = False, paths: list[str] | None = None
) -> AsyncIterator[tuple[Engine, str]]:
    """An adapter, and the URL of its engine; the paths of its requests go to `paths`."""
    port = free_port()
    url, app = f"http://127.0.0.1:{port}", create_fake_sglang_app(fake, incremental=incremental)

    async def noted(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if paths is not None and scope["type"] == "http":
            paths.append(scope["path"])
        await app(scope, receive, send)

    async with serve(noted, port):
        engine = connect("engine", url, "sglang")
        try:
            yield engine, url
        finally:
            await engine.close()


def start(engine: Engine, name: str, tokens: int = 1000, interval: int = 1) -> asyncio.Task[list[TokenChunk]]:
    request = GenerateRequest(name, [1, 2, 3], Sampling(max_tokens=tokens), interval)

    async def read() -> list[TokenChunk]:
        return [chunk async for chunk in engine.generate(request)]

    return asyncio.create_task(read(), name=name)


@pytest.mark.parametrize("how", ["pause", "abort"])
async def test_what_waits_before_the_scheduler_is_given_back(how: str) -> None:
    """The request arrived after a pause that its adapter did not know of; no abort of SGLang's reaches it."""
    fake, paths = FakeEngine("none"), list[str]()
    async with sglang(fake, paths=paths) as (engine, url):
        other = connect("other", url, "sglang")
        await other.pause()
        task = start(engine, "late")
        await until(lambda: "/generate" in paths, "it has arrived")
        await engine.pause()
        assert not task.done()
        await (engine.pause() if how == "pause" else engine.abort(["late"]))
        chunks = await task
        assert [(chunk.ids, chunk.finish) for chunk in chunks] == [([], "abort")]
        await engine.resume()
        assert len(await start(engine, "next", 3)) == 3
        assert fake.sampled == 3
        await other.close()

"""Requests that tests make of an engine by its adapter, without a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.config import EngineSettings, ModelSettings
from gateway.engines.base import Engine, GenerateRequest, TokenChunk
from gateway.engines.process import EngineProcess
from headgate.types import Sampling

PROMPT = [257, 84, 82, 68, 81, 198, 71, 72, 258, 198]
LONG = 20_000
"""Tokens of a request that is still running when something happens to it."""
PATIENCE_S = 120.0
"""No test waits longer for something that takes a moment; it does not bound the speed of an engine."""


def ask(
    name: str, prompt: Sequence[int] = PROMPT, *, interval: int = 1, salt: str = "", **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(name, prompt, Sampling(**sampling), interval, salt)


async def response(engine: Engine, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


def ids_of(chunks: Sequence[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


def check_form(chunks: Sequence[TokenChunk]) -> None:
    """Each token with its log-probability, and one finish at the very end."""
    assert all(len(chunk.ids) == len(chunk.logprobs) for chunk in chunks)
    assert all(value <= 0 for chunk in chunks for value in chunk.logprobs)
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def begun(
    engine: Engine, request: GenerateRequest
) -> tuple[asyncio.Task[list[TokenChunk]], list[TokenChunk]]:
    """Return a streamed request that has sampled something and goes on in a task; what it got is in the list."""
    chunks: list[TokenChunk] = []
    some = asyncio.Event()

    async def read() -> list[TokenChunk]:
        async for chunk in engine.generate(request):
            chunks.append(chunk)
            # Counting all of them at each would take the loop from everything else after some thousand.
            if not some.is_set() and len(ids_of(chunks)) >= 3:
                some.set()
        return chunks

    task = asyncio.create_task(read(), name=request.request_id)
    waiter = asyncio.create_task(some.wait(), name="some")
    done, _ = await asyncio.wait({task, waiter}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task in done:
        task.result()
    assert some.is_set(), f"{request.request_id}: {len(chunks)} chunks in {PATIENCE_S} s"
    return task, chunks


@asynccontextmanager
async def fake_engine(api: str, model: Path, log: Path) -> AsyncIterator[EngineProcess]:
    """Yield a fake engine behind an API, `vllm` or `sglang`, as a process."""
    table = {"launch": "fake", "api": api, "args": ["--delay-s", "0.005"], "log": str(log)}
    settings = EngineSettings.model_validate(table)
    process = await EngineProcess.start("engine", settings, ModelSettings(path=model), "model", str(model))
    try:
        yield process
    finally:
        await process.stop()

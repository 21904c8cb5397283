"""The end of a gateway process: immediately not ready, no new calls, running ones finish, and a deadline."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.engines.fake import FakeEngine, create_fake_app
from headgate.client import GatewayClient
from headgate.processes.ports import free_port
from tests.harness.agents import sdk
from tests.harness.gateway_command import Served, served
from tests.harness.gateways import serve, settings_for
from tests.harness.waiting import until

TOKENS = 40


@dataclass
class Stopped:
    """A served gateway with an episode, and its engine."""

    gateway: Served
    engine: FakeEngine
    client: openai.AsyncOpenAI
    store: Path

    async def stream(self) -> Any:
        """An open stream whose first chunk has come."""
        stream = await self.client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=TOKENS, stream=True
        )
        await anext(aiter(stream))
        return stream

    def calls(self) -> list[tuple[str, int]]:
        """Return each recorded call's finish reason and sampled tokens."""
        with sqlite3.connect(self.store) as connection:
            return connection.execute("SELECT finish_reason, completion_tokens FROM calls").fetchall()

    async def refused(self) -> None:
        """Return once the gateway reports that it is being stopped."""

        async def stopping() -> bool:
            return await self.gateway.status("/readyz") == (503, "stopping")

        await until(stopping, "/readyz reports it")


@asynccontextmanager
async def stoppable(model: Path, work: Path, shutdown_s: float = 3600.0) -> AsyncIterator[Stopped]:
    async with AsyncExitStack() as stack:
        engine, port = FakeEngine("none"), free_port()
        await stack.enter_async_context(serve(create_fake_app(engine), port))
        values = settings_for(
            model,
            work,
            engine={"launch": "external", "url": f"http://127.0.0.1:{port}"},
            server={"port": free_port(), "shutdown_s": shutdown_s, "keep_alive_s": 0.2},
        )
        gateway = await stack.enter_async_context(served(values, work))
        await gateway.ready()
        admin = await stack.enter_async_context(GatewayClient(gateway.url))
        client = await stack.enter_async_context(sdk(await admin.open_episode("task", mode="eval")))
        yield Stopped(gateway, engine, client, work / "gateway.db")


async def test_running_calls_finish_and_new_ones_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    async with stoppable(tiny_model, tmp_path) as running:
        engine = running.engine
        engine.hold_after(1)  # both have just begun when the signal comes
        stream = await running.stream()
        whole = asyncio.create_task(
            running.client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "whole"}], max_tokens=TOKENS
            )
        )
        await engine.arrived(2)
        running.gateway.signal()
        await running.refused()
        with pytest.raises(openai.InternalServerError) as refused:
            await running.client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "late"}]
            )
        assert refused.value.status_code == 503
        assert refused.value.code == "stopping"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.response.headers["x-should-retry"] == "true"
        assert refused.value.response.headers["connection"] == "close"
        assert (await running.gateway.status("/healthz"))[0] == 200
        engine.release()
        finishes = [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]
        assert finishes[-1] in ("stop", "length")
        assert (await whole).choices[0].finish_reason in ("stop", "length")
        assert await running.gateway.process.wait() == 0, running.gateway.log
        assert all(finish in ("stop", "length") for finish, _ in running.calls())
        assert len(running.calls()) == 2


async def test_after_the_deadline_streams_get_an_error_and_tokens_are_recorded(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with stoppable(tiny_model, tmp_path, shutdown_s=0.3) as running:
        running.engine.hold_after(1)
        stream = await running.stream()
        running.gateway.signal()
        with pytest.raises(openai.APIError) as ended:
            async for _ in stream:
                pass
        assert ended.value.code == "stopping"
        assert await running.gateway.process.wait() == 0, running.gateway.log
        ((finish, tokens),) = running.calls()
        assert finish == "abandoned"
        assert tokens > 0


async def test_a_second_signal_ends_the_waiting(tiny_model: Path, tmp_path: Path) -> None:
    async with stoppable(tiny_model, tmp_path, shutdown_s=3600.0) as running:
        running.engine.hold_after(1)
        stream = await running.stream()
        running.gateway.signal(signal.SIGINT)
        await running.refused()
        running.gateway.signal(signal.SIGINT)
        with pytest.raises(openai.APIError) as ended:
            async for _ in stream:
                pass
        assert ended.value.code == "stopping"
        assert await running.gateway.process.wait() == 0, running.gateway.log
        assert [finish for finish, _ in running.calls()] == ["abandoned"]


async def test_a_start_that_waits_for_an_engine_is_given_up(tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"  # never responds
    script.write_text("import time\nprint('here')\ntime.sleep(3600)\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec python3 {script}\n")
    python.chmod(0o755)
    values = settings_for(tiny_model, tmp_path, engine={"launch": "vllm", "python": str(python)})
    async with served(values, tmp_path) as gateway:
        await until(lambda: any(tmp_path.glob("engine-*.log")), "the engine is being started")
        gateway.signal()
        assert await gateway.process.wait() == 0, gateway.log
        assert "Traceback" not in gateway.log

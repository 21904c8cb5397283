"""Engines that die, the fake engine behind both APIs and real vLLM: their requests fail, and they are known as dead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.engines.base import Engine
from headgate.errors import EngineUnreachable
from tests.harness.requests import LONG, PATIENCE_S, ask, begun, fake_engine, response
from tests.harness.vllm import SharedEngine
from tests.harness.waiting import result_of

Mortal = tuple[Engine, Callable[[], None]]
"""An engine, and what kills it."""


@pytest.fixture(params=["vllm", "sglang"])
async def fake(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> AsyncIterator[Mortal]:
    """A fake engine of the test's own."""
    async with fake_engine(request.param, tiny_model, tmp_path / "engine.log") as process:
        yield process.engine, process.process.kill


@pytest.fixture
async def real(vllm: SharedEngine, tiny_model: Path) -> AsyncIterator[Mortal]:
    """The engine that all tests share."""
    async with vllm.running(tiny_model) as engine:
        yield engine, vllm.kill


async def check_death(mortal: Mortal) -> None:
    """A request that runs fails, and so does every later one."""
    engine, kill = mortal
    task, _ = await begun(engine, ask("dies", max_tokens=LONG))
    kill()
    with pytest.raises(EngineUnreachable):
        await result_of(task, "the request of the dead engine fails", PATIENCE_S)
    for work in (engine.pause(), engine.label(1), engine.score([1, 2]), response(engine, ask("dead"))):
        with pytest.raises(EngineUnreachable):
            await work
    assert not await engine.healthy()


async def test_a_fake_engine_that_died_is_unreachable(fake: Mortal) -> None:
    await check_death(fake)


@pytest.mark.vllm
@pytest.mark.kills_shared_engine
async def test_vllm_that_died_is_unreachable(real: Mortal) -> None:
    await check_death(real)

"""The SGLang adapter before the fake engine: what only SGLang does, and over which an adapter trips."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from gateway.engines.base import Engine, GenerateRequest, TokenChunk
from gateway.engines.fake import FakeEngine, Faults, create_fake_sglang_app
from gateway.engines.process import connect
from gateway.errors import EngineError
from gateway.types import Sampling
from scheduler.cluster.local import free_port
from tests.harness.gateways import serve


@asynccontextmanager
async def sglang(fake: FakeEngine, *, incremental: bool = False) -> AsyncIterator[tuple[Engine, str]]:
    """An adapter, and where the engine is."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with serve(create_fake_sglang_app(fake, incremental=incremental), port):
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


async def sampled(fake: FakeEngine, more: int = 3) -> None:
    """Waits until the engine has sampled."""
    enough = fake.sampled + more
    async with asyncio.timeout(10):
        while fake.sampled < enough:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("interval", [1, 5])
async def test_both_streams_hold_the_same_tokens(incremental: bool, interval: int) -> None:
    async with sglang(FakeEngine("none"), incremental=incremental) as (engine, _):
        chunks = await start(engine, "a", 23, interval)
    ids = [token for chunk in chunks for token in chunk.ids]
    async with sglang(FakeEngine("none")) as (engine, _):
        other = await start(engine, "b", 23)
    assert ids == [token for chunk in other for token in chunk.ids]
    assert len(ids) == 23
    assert chunks[-1].labels == (("default", 23),)


async def test_an_abort_in_the_queue_repeats_no_token() -> None:
    fake = FakeEngine("none", Faults(delay_s=0.005))
    async with sglang(fake, incremental=True) as (engine, _):
        task = start(engine, "a")
        await sampled(fake)
        await engine.pause(keep=True)
        await engine.abort(["a"])
        chunks = await asyncio.wait_for(task, 10)
        assert chunks[-1].finish == "abort"
        assert sum(len(chunk.ids) for chunk in chunks) == fake.sampled


@pytest.mark.parametrize("how", ["pause", "abort"])
async def test_what_waits_before_the_scheduler_is_given_back(how: str) -> None:
    """It arrived after a pause of which its adapter did not know; no abort of SGLang's reaches it."""
    fake = FakeEngine("none")
    async with sglang(fake) as (engine, url):
        other = connect("other", url, "sglang")
        await other.pause()
        task = start(engine, "late")
        await asyncio.sleep(0.2)
        await engine.pause()
        assert not task.done()
        await (engine.pause() if how == "pause" else engine.abort(["late"]))
        chunks = await asyncio.wait_for(task, 10)
        assert [(chunk.ids, chunk.finish) for chunk in chunks] == [([], "abort")]
        await engine.resume()
        assert len(await start(engine, "next", 3)) == 3
        assert fake.sampled == 3
        await other.close()


async def test_a_found_engine_that_is_frozen_can_be_paused() -> None:
    """As a gateway finds it that was killed in the middle of an update: SGLang's own pause would wait for ever."""
    fake = FakeEngine("none", Faults(delay_s=0.005))
    async with sglang(fake) as (engine, url):
        task = start(engine, "a")
        await sampled(fake)
        await engine.pause(keep=True, clear_cache=False)
        found = connect("found", url, "sglang")
        await asyncio.wait_for(found.pause(), 10)
        assert (await asyncio.wait_for(task, 10))[-1].finish == "abort"
        await found.load("other")
        await found.resume()
        await found.close()


async def test_a_load_that_flushes_fails_while_requests_are_frozen() -> None:
    """The trap that the adapter avoids, kept in the fake engine so that it stays avoided."""
    fake = FakeEngine("none", Faults(delay_s=0.005))
    async with sglang(fake) as (engine, url), httpx.AsyncClient(base_url=url) as http:
        task = start(engine, "a")
        await sampled(fake)
        await engine.pause(keep=True, clear_cache=False)
        answer = await http.post("/update_weights_from_disk", json={"model_path": "other"})
        assert answer.status_code == 400
        await engine.load("third")
        await engine.pause()
        await asyncio.wait_for(task, 10)


async def test_a_load_that_fails_says_so() -> None:
    async with sglang(FakeEngine("none", Faults(fail_load=True))) as (engine, _):
        await engine.pause()
        with pytest.raises(EngineError) as raised:
            await engine.load("other")
        assert "fault" in raised.value.message


async def test_a_paused_engine_is_well() -> None:
    async with sglang(FakeEngine("none")) as (engine, _):
        assert await engine.healthy()
        await engine.pause()
        assert await engine.healthy()

"""Calls of a real engine that falls ill in their middle go on in another one: one that goes silent, and one whose process hangs.

Both engines run weights that count, so a reply that lost a token on its way, or has one twice, does not count up.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.fake import FakeEngine, create_fake_app
from headgate.processes.ports import free_port
from tests.faults.weights import save_sources
from tests.harness.agents import sdk
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.vllm import SharedEngine
from tests.harness.waiting import result_of, until, while_going_on

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

STREAMS, TOKENS, BEFORE = 4, 300, 100
"""The streams, their tokens, and how many of these the engine samples before it falls ill."""
NEVER_S = 3600.0
WHOLE = "".join(chr(ord("!") + number % 10) for number in range(TOKENS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that count, for either engine."""
    return save_sources(tmp_path_factory.mktemp("counting"))[0]


@asynccontextmanager
async def two_engines(
    vllm: SharedEngine, model: Path, work: Path, **engine: Any
) -> AsyncIterator[tuple[RunningGateway, FakeEngine, str]]:
    """A gateway with the shared engine, and a fake one that `add_spare` adds."""
    spare, port = FakeEngine("none"), free_port()
    values = settings_for(model, work, engine=vllm.settings | engine)
    async with serve(create_fake_app(spare), port), run_gateway(values, in_process=False) as gateway:
        yield gateway, spare, f"http://127.0.0.1:{port}"


async def add_spare(gateway: RunningGateway, url: str) -> None:
    """Adds the spare engine, which only calls that leave the real one will use."""
    added = await gateway.http.post(
        "/admin/v1/engines", json={"name": "spare", "url": url}, params={"wait": 60}
    )
    assert added.json()["state"] == "open", added.text


async def stream(gateway: RunningGateway, number: int) -> tuple[str, str, str | None]:
    """A streamed reply of TOKENS tokens: its episode, what the client received, and why it ended."""
    opened = await gateway.admin.open_episode(f"stream-{number}", mode="eval")
    text, finish = "", None
    messages: Any = [{"role": "user", "content": "count!"}]
    async with sdk(opened) as client:
        chunks = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=TOKENS, stream=True
        )
        async for chunk in chunks:
            for choice in chunk.choices:
                text, finish = text + (choice.delta.content or ""), choice.finish_reason
    return opened.episode_id, text, finish


async def check_calls_go_on(
    world: tuple[RunningGateway, FakeEngine, str],
    vllm: SharedEngine,
    fall_ill: Callable[[], None],
    noticed: Callable[[], bool],
) -> None:
    """Start streams in the real engine, which fails in their middle; they end in the spare one, and nothing is missing."""
    gateway, spare, url = world
    real = gateway.slot
    with vllm.barrier(STREAMS, BEFORE) as stands_still:
        streams = asyncio.gather(*[stream(gateway, number) for number in range(STREAMS)])
        await while_going_on(stands_still(), streams, "the engine stands still before the streams end")
    await until(
        lambda: [len(run.call.turn.ids) for run in real.runs.values()] == [BEFORE] * STREAMS,
        "the gateway has every token that the engine has sampled",
        300,
    )
    await add_spare(gateway, url)
    fall_ill()
    await until(noticed, "the illness is noticed", 300)
    replies = await result_of(streams, "every reply is whole", 300)
    assert [(text, finish) for _, text, finish in replies] == [(WHOLE, "length")] * STREAMS
    assert spare.sampled == STREAMS * (TOKENS - BEFORE)
    for episode, _, _ in replies:
        (turn,) = [node for node in (await gateway.admin.trajectory(episode))["nodes"] if node["sampled"]]
        assert turn["versions"] == [[0, TOKENS]]
        assert [token % 10 for token in turn["ids"]] == [number % 10 for number in range(TOKENS)]


async def check_is_well_again(gateway: RunningGateway) -> None:
    """The real engine is taken back, and serves."""
    await until(lambda: gateway.slot.state == "open", "the engine is open again", 300)
    removed = await gateway.http.delete("/admin/v1/engines/spare", params={"wait": 60})
    assert removed.json()["removed"], removed.text
    _, headers = await gateway.open("afterwards", mode="eval")
    reply = await gateway.chat(headers, max_tokens=10)
    assert reply.json()["choices"][0]["message"]["content"] == WHOLE[:10]


async def test_calls_of_an_engine_that_goes_silent_go_on_elsewhere(
    vllm: SharedEngine, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine serves its health checks, and samples nothing."""
    async with two_engines(vllm, model, tmp_path, stall_s=NEVER_S / 2) as world:
        gateway, _, _ = world
        real = gateway.slot

        def stay_silent() -> None:
            real.last_token_at -= NEVER_S

        await check_calls_go_on(
            world, vllm, stay_silent, lambda: "demo-0 is lost: no token for" in caplog.text
        )
        await check_is_well_again(gateway)


async def test_calls_of_an_engine_whose_process_hangs_go_on_elsewhere(
    vllm: SharedEngine, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connections stay open, and nothing is served."""
    async with two_engines(vllm, model, tmp_path, stall_s=NEVER_S, health_s=0.2) as world:
        try:
            await check_calls_go_on(
                world,
                vllm,
                lambda: vllm.signal(signal.SIGSTOP),
                lambda: "demo-0 is lost: no response to 3 health checks" in caplog.text,
            )
        finally:
            vllm.signal(signal.SIGCONT)
        await check_is_well_again(world[0])

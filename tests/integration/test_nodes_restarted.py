"""Claims are not stored: a gateway that was killed with SIGKILL leaves nodes alone until their trainers have spoken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from gateway.engines.fake import FakeEngine, create_fake_app
from headgate.client import GatewayClient, GatewayRefused
from headgate.processes.ports import free_port
from tests.harness import programs
from tests.harness.gateways import serve, settings_for
from tests.harness.waiting import LONG_S, until
from trainer.loop.feed import Feed
from trainer.loop.nodes import Nodes

NODE = {"tags": ["rollout", "train"]}


class Counted(FakeEngine):
    """Knows how often it was woken, whatever became of that."""

    wakes = 0

    async def wake(self) -> None:
        self.wakes += 1
        await super().wake()


async def ask(admin: GatewayClient, http: httpx.AsyncClient) -> None:
    """An agent that asks for ever, whatever becomes of the gateway."""
    while True:
        try:
            opened = await admin.open_episode("task", mode="eval")
            body = {"model": "any", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
            headers = {"Authorization": f"Bearer {opened.api_key}"}
            await http.post("/v1/chat/completions", json=body, headers=headers)
        except (httpx.TransportError, GatewayRefused):
            await asyncio.sleep(0.05)


class Cluster:
    """An engine that lives on no node, one on a node that is lent, agents, and a gateway that may be killed."""

    def __init__(
        self, values: dict[str, Any], work: Path, own: FakeEngine, engine: Counted, admin: GatewayClient
    ) -> None:
        self.own = own
        self.engine = engine
        self.admin = admin
        self.gateway = programs.gateway(values, work / "gateway.log")
        self._values = values
        self._work = work

    async def restart(self, claim_s: float) -> None:
        """Kill the gateway and start a new one."""
        self.gateway.kill()
        self._values["lending"]["claim_s"] = claim_s
        self.gateway = programs.gateway(self._values, self._work / "gateway.log")
        await self.gateway.start()

    async def becomes(self, role: str) -> None:
        """Wait until the node has this role."""

        async def is_so() -> bool:
            return (await self.admin.node("t0"))["role"] == role

        await until(is_so, f"t0 becomes {role}")

    async def works(self) -> None:
        """Wait until the lent engine has a call; calls of the other one end, so that others begin."""
        self.own.release()
        await self.engine.arrived(1)
        self.own.hold_after(1)

    async def considered(self) -> None:
        """Wait until this gateway's program has seen several times that there is work for one more engine."""

        def is_so() -> bool:
            lines = (self._work / "control.jsonl").read_text().splitlines()
            begins = max(i for i, line in enumerate(lines) if line.startswith('{"format"'))
            events = [json.loads(line) for line in lines[begins:] if '"action":"lending.filling"' in line]
            return sum(event["value"]["running"] > 1 for event in events) >= 3

        await until(is_so, "there is work")


@asynccontextmanager
async def cluster(model: Path, work: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        engines, ports = (FakeEngine("none"), Counted("none")), (free_port(), free_port())
        for engine, port in zip(engines, ports, strict=True):
            engine.hold_after(1)
            await stack.enter_async_context(serve(create_fake_app(engine), port))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        values = settings_for(
            model,
            work,
            engine={"launch": "external", "url": urls[0], "sleep": "level1"},
            nodes={"t0": {**NODE, "urls": [urls[1]]}},
            lending={"margin_s": 0.0, "min_stay_s": 0.0, "claim_s": 3600.0},
        )
        url = f"http://127.0.0.1:{values['server']['port']}"
        admin = await stack.enter_async_context(GatewayClient(url, timeout_s=LONG_S))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=LONG_S))
        found = Cluster(values, work, *engines, admin)
        stack.callback(lambda: found.gateway.kill())
        await found.gateway.start()
        agents = [asyncio.create_task(ask(admin, http), name=f"agent-{i}") for i in range(4)]
        try:
            yield found
        finally:
            for agent in agents:
                agent.cancel()
            await asyncio.gather(*agents, return_exceptions=True)


async def test_a_gateway_that_is_killed_while_a_node_is_claimed_leaves_it_to_the_trainer(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with cluster(tiny_model, tmp_path) as running:
        trainer = Nodes(Feed(running.admin, None, 60.0), ["t0"])
        await trainer.release()
        await running.becomes("rollout")
        await trainer.claim()
        wakes = running.engine.wakes
        assert running.engine.asleep == 1
        await running.restart(claim_s=3600.0)
        await running.considered()
        assert ((await running.admin.node("t0"))["role"], running.engine.wakes) == ("idle", wakes)
        trainer._claim_s = 0.3  # the interval of its renewals
        keeper = asyncio.create_task(trainer.renew(), name="keeper")
        await running.becomes("train")
        keeper.cancel()
        assert (running.engine.asleep, running.engine.wakes) == (1, wakes)
        assert running.engine.refused == 0
        await trainer.release()
        await running.becomes("rollout")
        await running.works()


async def test_a_gateway_that_is_killed_while_a_node_is_lent_lends_it_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The gateway cannot know that no trainer computes there, so it waits until one speaks, or has been silent for too long."""
    async with cluster(tiny_model, tmp_path) as running:
        for claim_s in (3600.0, 1.0):
            await running.admin.release("t0")
            await running.becomes("rollout")
            await running.works()
            await running.restart(claim_s)
            if claim_s > 1:
                await running.considered()
                assert (await running.admin.node("t0"))["role"] != "rollout"
        await running.becomes("rollout")
        await running.works()

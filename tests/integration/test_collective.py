"""Versions that go straight from the trainer's server into engines, over real gloo; and peers that die on the way."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.process import connect
from headgate.weights.plugin.headgate_transfer.devices import shared_memory
from tests.harness.agents import agent, finished, start_held
from tests.harness.barrier import release
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.programs import Program, fake_engine, sender_of
from tests.harness.records import check_everything
from tests.harness.waiting import until
from tests.harness.weights import fake_weights, probe_of, write_manifest_of_pieces

NAMES = ("demo-0", "demo-1")


@dataclass
class World:
    """A gateway, a trainer's server and two engines, each a process of its own."""

    gateway: RunningGateway
    trainer: Path
    sent: Path
    """The folder of the trainer's server; the gateway reads `trainer`."""
    sender: Program
    engines: dict[str, Program]
    base: Path

    def write(self, version: int) -> Path:
        """Write a version, for the gateway and for the server."""
        before = self.trainer / f"v{version - 1:06d}" if version > 1 else self.base
        folder = fake_weights(self.trainer / f"v{version:06d}", f"weights {version}")
        write_manifest_of_pieces(folder, version, version - 1, probe_of(folder, before))
        shutil.copytree(folder, self.sent / folder.name)
        return folder

    def slot(self, name: str) -> Any:
        return self.gateway.model.pool.slots[name]

    async def runs(self, name: str, version: int) -> None:
        slot = self.slot(name)
        await until(lambda: slot.state == "open" and slot.version == version, f"{name} runs {version}")

    async def state(self, name: str) -> dict[str, Any]:
        return await self.gateway.fake("state", self.slot(name))

    async def faults(self, name: str, **values: Any) -> None:
        await self.gateway.fake("faults", self.slot(name), **values)

    async def begun_to_receive(self, name: str) -> None:
        async def begun() -> bool:
            return (await self.state(name))["received_frames"] > 0

        await until(begun, f"{name} stands in the middle of a transfer")


@asynccontextmanager
async def world(model: Path, work: Path, *, owned: bool = False) -> AsyncIterator[World]:
    """`owned`: the gateway starts the engines itself."""
    async with AsyncExitStack() as stack:
        (work / "trainer").mkdir()
        (work / "sent").mkdir()
        sender = sender_of(work / "sent")
        engines = {} if owned else {name: fake_engine(model) for name in NAMES}
        for program in (sender, *engines.values()):
            stack.callback(program.kill)
        await asyncio.gather(*(program.start() for program in (sender, *engines.values())))
        places: dict[str, Any] = {"launch": "fake", "count": 2} if owned else {"launch": "external"}
        if engines:
            places["urls"] = [engine.url for engine in engines.values()]
        values = settings_for(
            model,
            work,
            engine={**places, "transport": "collective", "max_restarts": 100, "start_s": 120},
            update={"order": "rolling"},
            weights={"sources": [sender.url], "transfer_s": 300},
        )
        gateway = await stack.enter_async_context(run_gateway(values, in_process=False))
        yield World(gateway, work / "trainer", work / "sent", sender, engines, model)


async def test_an_engine_reports_the_devices_by_which_auto_is_decided(tiny_model: Path) -> None:
    program = fake_engine(tiny_model)
    async with AsyncExitStack() as stack:
        stack.callback(program.kill)
        await program.start()
        engine = connect("demo", program.url, "vllm")
        stack.push_async_callback(engine.close)
        assert await engine.devices() == [{"gpu": "", "memory": shared_memory()}]


async def test_engines_run_what_they_were_sent_and_every_token_has_its_version(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Two versions; a byte of the second is flipped on the way at first, which never reaches the weights."""
    async with world(tiny_model, tmp_path) as w:
        done = asyncio.Event()
        agents = [asyncio.create_task(agent(w.gateway, done, i), name=f"agent-{i}") for i in range(2)]
        written = {0: tiny_model.resolve(), 1: w.write(1), 2: w.write(2)}
        record = await w.gateway.admin.publish(1, str(written[1]), wait_s=600)
        assert record["state"] == "live", record["why"]
        assert [report["failure"] for report in record["report"]] == ["", ""]
        assert [report["probe"]["verdict"] for report in record["report"]] == ["passed", "passed"]
        file = w.sent / written[2].name / "model.safetensors"
        sound = file.read_bytes()
        file.write_bytes(sound[:-1] + b"x")
        publishing = asyncio.create_task(
            w.gateway.admin.publish(2, str(written[2]), wait_s=600), name="publish"
        )
        await until(lambda: "are not the manifest's" in w.slot("demo-0").reason, "the refusal")
        assert (w.slot("demo-1").state, w.slot("demo-1").version) == ("open", 1)
        file.write_bytes(sound)
        assert (await publishing)["state"] == "live"
        for name in NAMES:
            await w.runs(name, 2)
            assert (await w.state(name))["received_frames"], "it was sent the version, and read no file"
        done.set()
        await check_everything(w.gateway, written, list(await asyncio.gather(*agents)))


@pytest.mark.parametrize(
    "fault",
    [{"hold_load": True}, pytest.param({"hold_receive": 0}, marks=pytest.mark.long)],
    ids=["loads", "receives"],
)
async def test_an_engine_that_is_killed_in_a_transfer_takes_no_other_along(
    tiny_model: Path, tmp_path: Path, fault: dict[str, Any]
) -> None:
    async with world(tiny_model, tmp_path, owned=True) as w:
        agents, done = await start_held(w.gateway, 2, 2)
        written = {0: tiny_model.resolve(), 1: w.write(1)}
        await w.faults("demo-0", **fault)
        publishing = asyncio.create_task(
            w.gateway.admin.publish(1, str(written[1]), wait_s=600), name="publish"
        )
        await w.begun_to_receive("demo-0")
        if "hold_load" in fault:
            await until(lambda: w.slot("demo-0").state == "held", "it is paused to take the weights")
        else:
            assert w.slot("demo-0").state == "open", "it samples while it receives"
        os.kill(w.slot("demo-0").process.process.pid, signal.SIGKILL)
        assert (await publishing)["state"] == "live"
        for name in NAMES:
            await w.runs(name, 1)
        assert (await w.state("demo-1"))["received_frames"] > 0
        done.set()
        await release(w.gateway)
        await check_everything(w.gateway, written, await finished(agents, done))


async def test_an_engine_elsewhere_that_missed_a_version_is_sent_it_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with world(tiny_model, tmp_path) as w:
        written = w.write(1)
        assert (await w.gateway.admin.publish(1, str(written), wait_s=600))["state"] == "live"
        w.engines["demo-1"].kill()
        await until(lambda: w.slot("demo-1").state != "open", "the gateway notices")
        await w.faults("demo-0", hold_receive=0)  # a sender to it would wait now
        await w.engines["demo-1"].start()
        await w.runs("demo-1", 1)
        assert (await w.state("demo-1"))["received_frames"] > 0


async def test_a_sender_that_is_killed_in_a_transfer_is_named_and_the_next_one_is_used(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with world(tiny_model, tmp_path) as w:
        written = {0: tiny_model.resolve(), 1: w.write(1)}
        for name in NAMES:
            await w.faults(name, hold_receive=0)
        publishing = asyncio.create_task(
            w.gateway.admin.publish(1, str(written[1]), wait_s=600), name="publish"
        )
        for name in NAMES:
            await w.begun_to_receive(name)
        w.sender.kill()
        await until(lambda: f"was not sent: {w.sender.url}" in w.slot("demo-0").reason, "the reason")
        assert (w.slot("demo-1").state, w.slot("demo-1").version) == ("open", 0)
        for name in NAMES:
            await w.faults(name, hold_receive=None)
        await w.sender.start()
        assert (await publishing)["state"] == "live"

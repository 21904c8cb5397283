"""Versions that are adapters: nothing pauses, a call ends under the version that it began with, and every token has it.

The fake engine's tokens are a function of the adapter that samples them; its identity is the content of the adapter's file.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.fake import FakeEngine, create_fake_app
from headgate.client import GatewayRefused
from headgate.processes.ports import free_port
from tests.harness.agents import finished, start_agents
from tests.harness.barrier import arrived, release
from tests.harness.gateways import RunningGateway, faults, run_gateway, serve, settings_for, slots
from tests.harness.records import check_everything, nodes_of, versions_of
from tests.harness.waiting import LONG_S, until
from tests.harness.weights import fake_adapter, probe_of, write_manifest_of_pieces


def lora(model: Path, work: Path, count: int = 1, order: str = "pull") -> dict[str, Any]:
    """Settings with engines that the gateway starts."""
    engine = {"transport": "lora", "count": count}
    return settings_for(model, work, engine=engine, update={"order": order})


def write(directory: Path, base: Path, count: int) -> dict[int, Path]:
    """Version 0, and adapters 1 to `count`."""
    found = {0: base.resolve()}
    for version in range(1, count + 1):
        found[version] = fake_adapter(directory / f"v{version:06d}", f"adapter {version}")
        probe = probe_of(found[version], found[version - 1])
        write_manifest_of_pieces(found[version], version, version - 1, probe)
    return found


async def publish(gateway: RunningGateway, version: int, path: Path) -> dict[str, Any]:
    """The record of a version that is live."""
    record = await gateway.admin.publish(version, str(path), wait_s=LONG_S)
    assert record["state"] == "live", record["why"]
    return record


async def test_a_call_ends_under_its_version_and_those_of_the_oldest_go_on_under_a_newer_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    written = write(tmp_path / "versions", tiny_model, 3)
    async with run_gateway(lora(tiny_model, tmp_path), in_process=False) as gateway:
        await faults(gateway, endless=True, hold_after=4)
        cohorts = []
        for version in (1, 2, 3):
            cohorts.append(start_agents(gateway, 4))
            await arrived(gateway, 4 * version)
            record = await publish(gateway, version, written[version])
            (report,) = record["report"]
            assert report["probe"]["verdict"] == "passed"
            assert report["seconds"].keys() == {"load", "probe", "open"}, "no step holds or pauses"
            assert report["streams"] == 4 * version
            await arrived(gateway, 4 * version)
        names = (await gateway.fake("state"))["adapters"]
        assert [name.partition("-")[0] for name in names] == ["v2", "v3"], "two side by side"
        for _, done in cohorts:
            done.set()
        await release(gateway)
        agents = [await finished(*cohort) for cohort in cohorts]
        crossed = [await check_everything(gateway, written, cohort, endless=True) for cohort in agents]
        assert crossed == [8, 4, 0], "those of version 0 left it for the first adapter, of 1 for the third"
        for cohort, expected in zip(agents, ({0, 1, 2}, {1, 2}, {2}), strict=True):
            for episode, _ in cohort:
                assert set(versions_of((await nodes_of(gateway, episode))[1])) == expected


async def test_an_adapter_that_an_engine_does_not_apply_is_found_by_the_probe(
    tiny_model: Path, tmp_path: Path
) -> None:
    written = write(tmp_path / "versions", tiny_model, 1)
    values = lora(tiny_model, tmp_path, 2, order="rolling")  # each engine reports
    async with run_gateway(values, in_process=False) as gateway:
        agents, done = start_agents(gateway, 2)
        (sick, sound) = slots(gateway)
        await gateway.fake("faults", sick, stale_reload=True)
        record = await publish(gateway, 1, written[1])
        failures = {report["engine"]: report["failure"] for report in record["report"]}
        assert "does not hold version 1" in failures[sick.name]
        assert failures[sound.name] == ""
        await until(lambda: sick.state == "open" and sick.version == 1, "it is started again, and has it")
        await check_everything(gateway, written, await finished(agents, done))


async def test_an_engine_that_is_killed_while_it_loads_comes_back_with_base_and_adapter(
    tiny_model: Path, tmp_path: Path
) -> None:
    written = write(tmp_path / "versions", tiny_model, 2)
    values = lora(tiny_model, tmp_path, 2)
    async with run_gateway(values, in_process=False) as gateway:
        agents, done = start_agents(gateway, 3)
        await publish(gateway, 1, written[1])
        victim, other = slots(gateway)
        for slot in (victim, other):
            await until(lambda slot=slot: slot.state == "open" and slot.version == 1, f"{slot.name} has it")
        await gateway.fake("faults", victim, hold_load=True)
        publishing = asyncio.create_task(publish(gateway, 2, written[2]), name="publish")
        await until(lambda: 2 in gateway.model.versions._updates, "the update has begun")
        assert (victim.state, other.state) == ("open", "open"), "no call waits for it"
        os.kill(victim.process.process.pid, signal.SIGKILL)
        await publishing
        for slot in (victim, other):
            await until(lambda slot=slot: slot.state == "open" and slot.version == 2, f"{slot.name} has it")
        await check_everything(gateway, written, await finished(agents, done))
    async with run_gateway(values, in_process=False) as gateway:  # and so does one of the next gateway
        agents, done = start_agents(gateway, 1)
        await until(lambda: slots(gateway)[0].last_token_at > 0, "it samples")
        assert [slot.version for slot in slots(gateway)] == [2, 2]
        await check_everything(gateway, written, await finished(agents, done))


async def test_two_trainers_with_one_number_do_not_both_publish_it(tiny_model: Path, tmp_path: Path) -> None:
    mine, theirs = (write(tmp_path / name, tiny_model, 1)[1] for name in ("mine", "theirs"))
    async with run_gateway(lora(tiny_model, tmp_path), in_process=False) as gateway:
        await publish(gateway, 1, mine)
        with pytest.raises(GatewayRefused, match="was published from"):
            await gateway.admin.publish(1, str(theirs), wait_s=60)


async def test_an_adapter_that_a_gateway_before_has_left_is_on_no_token_of_the_first_version(
    tiny_model: Path, tmp_path: Path
) -> None:
    """That gateway was killed after it had loaded the first adapter, which the engine puts on requests without one."""
    written, engine, port = (
        write(tmp_path / "versions", tiny_model, 1),
        FakeEngine(str(tiny_model)),
        free_port(),
    )
    values = lora(tiny_model, tmp_path)
    values["engine"].update(launch="external", url=f"http://127.0.0.1:{port}")
    async with serve(create_fake_app(engine), port):
        await engine.load_adapter("v1-left", str(written[1]))
        async with run_gateway(values, in_process=False) as gateway:
            agents, done = start_agents(gateway, 2)
            await until(lambda: gateway.slot.last_token_at > 0, "it samples")
            await publish(gateway, 1, written[1])
            await check_everything(gateway, written, await finished(agents, done))

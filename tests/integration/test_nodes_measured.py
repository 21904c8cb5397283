"""The measurements by which nodes are lent: how full a batch is, and how long the trainer computes on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headgate.client import GatewayRefused
from scheduler.program.nodes import Filling
from tests.harness.gateways import RunningGateway, run_gateway, settings_for

BOTH = ["rollout", "train"]


async def earn(gateway: RunningGateway, group: str) -> None:
    """One call, and a reward: the group is there."""
    opened = await gateway.admin.open_episode(group, group, 1)
    headers = {"Authorization": f"Bearer {opened.api_key}"}
    assert (await gateway.chat(headers, max_tokens=2)).is_success
    await gateway.admin.reward(opened.episode_id, 1.0)


def filling(gateway: RunningGateway) -> Filling | None:
    """Return the newest event that the control program got."""
    return gateway.services.coordinator.host.program.lending._batches._filling.get("demo")


async def test_a_complete_or_leased_batch_is_reported_immediately(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_nodes: Any) -> None:
        """Stand in for the report of every second."""

    monkeypatch.setattr("gateway.control.nodes.Nodes.tend", never)
    staleness = {"batch": 2, "eta": 1, "min_members": 1}
    async with run_gateway(settings_for(tiny_model, tmp_path, staleness=staleness)) as gateway:
        await gateway.admin.add_node("t0", BOTH)
        await earn(gateway, "a")
        assert filling(gateway) == Filling("demo", 0, 0, 2, 0), "as it was at the start"
        await earn(gateway, "b")
        assert filling(gateway) == Filling("demo", 0, 2, 2, 0)
        lease = await gateway.admin.lease("trainer")
        await earn(gateway, "c")
        assert filling(gateway) == Filling("demo", 0, 2, 2, 0, leased=0)
        await gateway.admin.ack(lease, "checkpoint")
        assert filling(gateway) == Filling("demo", 1, 1, 2, 0, leased=0, trained=0)
        await earn(gateway, "d")
        assert filling(gateway) == Filling("demo", 1, 2, 2, 0, leased=0, trained=0)


async def test_a_trainer_may_report_how_long_it_computed(gateway: RunningGateway) -> None:
    await gateway.admin.add_node("t0", BOTH)
    batches = gateway.services.coordinator.host.program.lending._batches
    await gateway.admin.claim("t0", wait_s=60)
    released = await gateway.http.post("/admin/v1/nodes/t0/release", json={})  # as older trainers do
    assert released.is_success
    assert batches.train_s("demo") == 0.0
    await gateway.admin.claim("t0", wait_s=60)
    assert (await gateway.admin.release("t0", busy_s=12.5))["claimable"]
    assert batches.train_s("demo") == 12.5
    for wrong in (-1.0, 1e9):
        with pytest.raises(GatewayRefused, match="busy_s"):
            await gateway.admin.release("t0", busy_s=wrong)
    bad = await gateway.http.post("/admin/v1/nodes/t0/release", content='{"busy_s": NaN}')
    assert bad.status_code == 400
    recorded = Path(gateway.settings.control.recording or "").read_text().splitlines()
    values = [json.loads(line)["value"] for line in recorded if '"action":"lending.released"' in line]
    assert [value["busy_s"] for value in values] == [0.0, 12.5]


async def test_the_busy_time_of_a_trainer_belongs_to_the_batch_that_it_acknowledged(
    gateway: RunningGateway,
) -> None:
    await gateway.admin.add_node("t0", BOTH)
    await gateway.admin.claim("t0", wait_s=60)
    await gateway.admin.release("t0")
    assert (await gateway.admin.status())["trained"] is None, "nothing is trained yet"
    size = gateway.settings.staleness.batch
    for number in range(size):
        await earn(gateway, f"group {number}")
    lease = await gateway.admin.lease("trainer")
    await gateway.admin.claim("t0", wait_s=60)
    await gateway.admin.ack(lease, "checkpoint")
    await gateway.admin.release("t0", busy_s=4.0, load_s=0.5, rest_s=2.0)
    trained = {"batch": 0, "busy_s": 4.0, "load_s": 0.5, "rest_s": 2.0}
    assert (await gateway.admin.status())["trained"] == trained
    await gateway.admin.release("t0")
    assert (await gateway.admin.status())["trained"] == trained, (
        "the trainer starts again, and has trained nothing"
    )

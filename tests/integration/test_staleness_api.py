"""The ledger as people see it, and a configuration that it does not fit."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.waiting import result_of, until


async def test_an_empty_ledger(gateway: RunningGateway) -> None:
    shown = await gateway.admin.staleness()
    empty = {"state": "PENDING", "occupied": 0, "reserved": 0, "leased": False, "groups": []}
    assert shown == {
        "model": "demo", "late_groups": "cancel", "eta": 1, "batch_size": 2, "version": 0, "consumed": 0, "lease": None,
        "batches": [{"batch": 0, **empty}, {"batch": 1, **empty}], "slowest": [], "waiting": {}, "lost": [],
    }  # fmt: skip


async def test_groups_are_shown_where_they_are(gateway: RunningGateway) -> None:
    """Starts take the latest batch, ends the earliest."""
    one, _ = await gateway.begin("a", group_id="a", group_size=2)
    two, _ = await gateway.begin("a", group_id="a", group_size=2)
    other, _ = await gateway.begin("b", group_id="b")
    await gateway.admin.reward(one, 1.0)
    shown = await gateway.admin.staleness()
    group = {"version": 0, "state": "reserved"}
    assert [row["groups"] for row in shown["batches"]] == [
        [],
        [
            {"group_id": "a", "size": 2, "members": {"open": 1, "rewarded": 1}, **group},
            {"group_id": "b", "size": 1, "members": {"open": 1}, **group},
        ],
    ]
    assert [(row["occupied"], row["reserved"]) for row in shown["batches"]] == [(0, 0), (0, 2)]
    for episode in (two, other):
        await gateway.admin.reward(episode, 1.0)
    lease = await gateway.admin.lease("trainer")
    shown = await gateway.admin.staleness()
    first = shown["batches"][0]
    assert (first["state"], first["occupied"], first["leased"]) == ("READY", 2, True)
    assert [g["group_id"] for g in first["groups"]] == ["a", "b"]
    assert {key: shown["lease"][key] for key in ("lease_id", "batch", "fence", "consumer")} == {
        "lease_id": lease.lease_id, "batch": 0, "fence": lease.fence, "consumer": "trainer",
    }  # fmt: skip
    assert 0 < shown["lease"]["left_s"] <= lease.deadline_s
    await gateway.admin.ack(lease, "checkpoint")
    shown = await gateway.admin.staleness()
    assert (shown["consumed"], shown["lease"]) == (1, None)
    assert [row["batch"] for row in shown["batches"]] == [1]


async def test_who_waits_and_what_was_lost_is_shown(tiny_model: Path, tmp_path: Path) -> None:
    values = settings_for(tiny_model, tmp_path, staleness={"batch": 1, "eta": 0, "min_members": 1})
    async with run_gateway(values) as gateway:
        episode, _ = await gateway.open("a", group_id="a")
        waiting = asyncio.create_task(gateway.open("b", group_id="b", group_size=2, wait_s=60))

        async def waits() -> bool:
            return (await gateway.admin.staleness())["waiting"] == {"b": 1}

        await until(waits, "the second group waits")
        await gateway.admin.abandon(episode, "crashed")
        await result_of(waiting, "the episode that waits is answered")
        shown = await gateway.admin.staleness()
        assert shown["waiting"] == {}
        assert shown["lost"] == [
            {"kind": "dropped", "reason": "crashed", "count": 1},
            {"kind": "dropped", "reason": "too_few_rewards", "count": 1},
        ]

"""A gateway's ledger in the store, and its batches in the control program's recording, over a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import select

from gateway.store.models import LedgerEventRow
from scheduler.planning.recorded import timeline_of
from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import command_to_json, event_from_json
from scheduler.program import PROGRAMS
from scheduler.reactor import Limit, replay
from scheduler.reactor.reading import Run
from scheduler.reactor.recording import Event
from tests.harness.gateways import run_gateway, settings_for
from tests.harness.states import state_of

_EVENTS = select(LedgerEventRow.event, LedgerEventRow.commands).order_by(LedgerEventRow.seq)


async def test_the_store_has_the_ledgers_decisions_and_the_recording_its_batches_over_a_restart(
    tiny_model: Path, tmp_path: Path
) -> None:
    values = settings_for(tiny_model, tmp_path, staleness={"batch": 1, "eta": 1, "min_members": 1})
    async with run_gateway(values) as gateway:
        first, _ = await gateway.begin("a", group_id="a")
        second, _ = await gateway.begin("b", group_id="b")
        refused = await gateway.http.post("/admin/v1/episodes", json={"task_id": "c", "group_id": "c"})
        assert refused.status_code == 429
        await gateway.admin.reward(second, 1.0)
    async with run_gateway(values) as gateway:
        lease = await gateway.admin.lease("trainer")
        await gateway.admin.ack(lease, "checkpoint")
        await gateway.admin.reward(first, 0.0)
        kept = gateway.model.ledger.rule
        stored = await gateway.services.database.read(lambda c: list(c.execute(_EVENTS)))
    again = StaleFlow(kept.settings)
    for event, commands in stored[1:]:
        decided = [command_to_json(command) for command in again.apply(event_from_json(event))]
        assert json.loads(json.dumps(decided)) == commands
    assert state_of(again) == state_of(kept)
    assert [[command["type"] for command in commands] for _, commands in stored[1:]] == [
        ["Admit"],
        ["Admit"],
        ["Occupied", "BatchReady"],
        [],
        ["Consumed"],
        ["Occupied", "BatchReady"],
    ]
    report = replay(tmp_path / "control.jsonl", PROGRAMS["control"])
    assert report.equal
    whole, leased = {"groups": 1, "leased": -1}, {"leased": 0, "trained": -1}
    assert [batches_of(run.run) for run in report.runs] == [
        [batch(groups=0), batch(**whole)],
        [
            batch(**whole),
            batch(groups=1, **leased),
            batch(batch=1, groups=0, leased=0, trained=0),
            batch(batch=1, groups=1, leased=0, trained=0),
        ],
    ]
    assert [step.number for step in timeline_of([run.run for run in report.runs]).steps] == [0]


async def test_a_gateways_recording_has_the_end_of_the_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "control.jsonl"
    monkeypatch.setattr("gateway.control.host._RECORDING", Limit(8_000))
    control = {"recording": str(path)}
    values = settings_for(tiny_model, tmp_path, control=control, staleness={"batch": 64, "eta": 0})
    async with run_gateway(values) as gateway:
        for number in range(80):
            await gateway.admin.add_node(f"n{number}", ["rollout"])
    report = replay(path, PROGRAMS["control"])
    assert report.equal
    assert [run.run.header.state is not None for run in report.runs] == [True, True]
    added = [d.value[0]["node"] for run in report.runs for d in run.decisions if d.port == "lending.roles"]
    assert len(added) < 80
    assert added == [f"n{number}" for number in range(80 - len(added), 80)]


def batch(**values: int) -> dict[str, int]:
    """Return a reported batch: by default the first one, without a lease."""
    return {"batch": 0, "leased": -1, "trained": -1, **values}


def batches_of(run: Run) -> list[dict[str, int]]:
    """Return the reported batches."""
    reported = [e.value for e in run.entries if isinstance(e, Event) and e.action == "lending.filling"]
    return [{name: value[name] for name in ("batch", "groups", "leased", "trained")} for value in reported]

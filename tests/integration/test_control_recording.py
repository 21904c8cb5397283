"""What the control program's recording has of a gateway's ledger, over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scheduler.policies.staleness_events import event_from_json
from scheduler.program import PROGRAMS, ControlProgram
from scheduler.reactor import replay
from scheduler.reactor.recording import Decision, Event, Run
from tests.harness.gateways import run_gateway, settings_for


async def test_the_ledgers_decisions_are_recorded_and_made_again_over_a_restart(
    tiny_model: Path, tmp_path: Path
) -> None:
    values = settings_for(tiny_model, tmp_path, staleness={"batch": 1, "eta": 1, "min_members": 1})
    async with run_gateway(values) as gateway:
        first, _ = await gateway.open("a", group_id="a")
        second, _ = await gateway.open("b", group_id="b")
        refused = await gateway.http.post("/admin/v1/episodes", json={"task_id": "c", "group_id": "c"})
        assert refused.status_code == 429
        await gateway.admin.reward(second, 1.0)
    async with run_gateway(values) as gateway:
        lease = await gateway.admin.lease("trainer")
        await gateway.admin.ack(lease, "checkpoint")
        await gateway.admin.reward(first, 0.0)
        kept = gateway.services.models.local["demo"].ledger.rule.to_json()
    recording = tmp_path / "control.jsonl"
    report = replay(recording, PROGRAMS["control"])
    assert report.equal
    told = [decisions_of(run.run) for run in report.runs]
    assert told == [
        ["Admit", "Admit", "Refuse", "Occupied", "BufferReady"],
        ["Consumed", "Occupied", "BufferReady"],
    ]
    assert ledger_after(report.runs[1].run) == kept


async def test_a_recording_ends_at_its_size_and_the_gateway_does_not(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "control.jsonl"
    control = {"recording": str(path), "recording_mb": 0.008}
    values = settings_for(tiny_model, tmp_path, control=control, staleness={"batch": 64, "eta": 0})
    async with run_gateway(values) as gateway:
        for number in range(40):
            await gateway.open("t", group_id=f"g{number}")
    assert 8_000 < path.stat().st_size < 16_000
    assert "control.jsonl ends here: this run's part has 0.008 MB ([control] recording_mb)" in caplog.text
    report = replay(path, PROGRAMS["control"])
    assert report.equal
    assert report.runs[0].run.full
    assert len(decisions_of(report.runs[0].run)) < 40


def decisions_of(run: Run) -> list[str]:
    """The classes of the ledger's commands, in order."""
    decided = [e for e in run.entries if isinstance(e, Decision) and e.port == "ledger_demo.decided"]
    return [command["type"] for decision in decided for command in decision.value]


def ledger_after(run: Run) -> dict[str, Any]:
    """What the recorded events make of the recorded first state."""
    rule = ControlProgram(run.header.settings).ledgers["demo"].rule
    for entry in run.entries:
        if isinstance(entry, Event) and entry.action == "ledger_demo.told":
            rule.apply(event_from_json(entry.value))
    return rule.to_json()

"""A call whose length was predicted moves: what it still takes is less by what it has sampled, and a replay decides the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from scheduler.program import PROGRAMS
from scheduler.reactor import replay
from scheduler.reactor.recording import Event, read
from tests.harness.barrier import arrived, hold_after, release
from tests.harness.gateways import RunningGateway, run_gateway, slots, two_engines
from tests.harness.records import lasting

LONG = 60
"""Tokens of a call at most."""


async def ask(gateway: RunningGateway, question: Any) -> str:
    """Make one call of a new episode of the task, and return the engine that sampled its end."""
    episode, headers = await gateway.open("long", mode="eval")
    response = await gateway.chat(headers, max_tokens=LONG, messages=question)
    assert response.status_code == 200, response.text
    (call,) = (await gateway.admin.episode(episode))["calls"]
    return call["engine"]


def wanted(path: Path) -> list[dict[str, Any]]:
    """Return the control program's events of calls that want an engine, in order."""
    (run,) = read(path)
    demands = [e.value for e in run.entries if isinstance(e, Event) and e.action.endswith("demo.demand")]
    return [one for demand in demands for one in demand["arrived"]]


async def test_what_a_call_that_moves_is_expected_to_take_is_less_by_what_it_has_sampled(
    tiny_model: Path, tmp_path: Path
) -> None:
    values = two_engines(tiny_model, tmp_path, lengths={"ranker": "history"}, routing={"rule": "gain"})
    async with run_gateway(values, in_process=False) as gateway:
        question = lasting(gateway.settings.model)
        for _ in range(4):
            await ask(gateway, question)
        await hold_after(gateway, 2)
        last = asyncio.create_task(ask(gateway, question))
        await arrived(gateway, 1)
        (call,) = [run.call for slot in slots(gateway) for run in slot.runs.values()]
        expected, before = call.hints.expected, call.turn.engine
        assert expected > 8
        await gateway.model.pool.move(call.call_id, None)
        await release(gateway)
        assert await last != before
    mine = [one for one in wanted(tmp_path / "control.jsonl") if one["call"] == call.call_id]
    assert len(mine) == 2, "it arrived again when it had moved"
    sampled = mine[1]["length"] - mine[0]["length"]
    assert sampled == 2
    assert [one["expected"] for one in mine] == [expected, expected - sampled]
    assert replay(tmp_path / "control.jsonl", PROGRAMS["control"]).equal

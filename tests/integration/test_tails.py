"""Calls that are predicted to be long, from their prediction to engines set aside for them; and all of it again in a replay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from scheduler.program import PROGRAMS
from scheduler.reactor import replay
from scheduler.reactor.recording import Decision, Event, read
from tests.harness.barrier import arrived, hold_after, release
from tests.harness.gateways import RunningGateway, run_gateway, slots, two_engines
from tests.harness.records import lasting
from tests.harness.waiting import until

LONG = 60
"""Tokens of a long call at most; short ones have 4."""


async def ask(gateway: RunningGateway, question: Any, task: str, tokens: int) -> str:
    """One call of a new episode; answers the engine that sampled its end."""
    episode, headers = await gateway.open(task, mode="eval")
    answer = await gateway.chat(headers, max_tokens=tokens, messages=question)
    assert answer.status_code == 200, answer.text
    (call,) = (await gateway.admin.episode(episode))["calls"]
    return call["engine"]


async def ask_all(gateway: RunningGateway, question: Any, tasks: list[str]) -> list[str]:
    return await asyncio.gather(
        *(ask(gateway, question, task, LONG if task == "long" else 4) for task in tasks)
    )


def calls_of(gateway: RunningGateway) -> list[Any]:
    return [run.call for slot in slots(gateway) for run in slot.runs.values()]


def offload(gateway: RunningGateway) -> set[str]:
    """The engines that are set aside."""
    program = gateway.services.leader.host.program
    return {engine.name for engine in program.placements["demo"]._engines.open.values() if engine.aside}


def wanted(path: Path) -> list[dict[str, Any]]:
    """Returns the control program's events of calls that want an engine, in order."""
    (run,) = read(path)
    told = [e.value for e in run.entries if isinstance(e, Event) and e.action.endswith("demo.demand")]
    return [one for demand in told for one in demand["arrived"]]


async def test_long_calls_have_engines_of_their_own_and_a_replay_decides_the_same(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six tasks of which one is long are learnt; then a long call and eight of a short task that last, then others."""
    monkeypatch.setattr("scheduler.program.placement._DIVIDE_S", 0.0)
    values = two_engines(
        *(tiny_model, tmp_path),
        lengths={"ranker": "history", "warm_calls": 0},
        routing={"tails": True, "rule": "gain", "mu": 0.0, "slots": 1},
    )
    async with run_gateway(values, in_process=False) as gateway:
        question = lasting(gateway.settings.model)
        for _ in range(4):
            await ask_all(gateway, question, ["long", *(f"short-{i}" for i in range(6))])
        await until(lambda: not offload(gateway), "nobody has calls, and none is set aside")
        await hold_after(gateway, 2)
        stay = ["long", *["short-0"] * 8]
        first = asyncio.gather(*(ask(gateway, question, task, LONG) for task in stay))
        await arrived(gateway, 9)
        short, (long,) = (
            [call for call in calls_of(gateway) if call.hints.tail == tail] for tail in (False, True)
        )
        assert [call.hints.expected for call in short] == [4] * 8
        expected = long.hints.expected
        assert expected > 8
        await until(lambda: len(offload(gateway)) == 1, "one is set aside")
        await gateway.model.pool.move(long.call_id, None)
        (kept,) = offload(gateway)
        later = asyncio.gather(
            *(ask(gateway, question, task, LONG) for task in ["long", "short-1", "short-2", "short-3"])
        )
        await arrived(gateway, 13)
        await release(gateway)
        assert (await first)[0] == kept
        assert await later == [kept, *[({"demo-0", "demo-1"} - {kept}).pop()] * 3]
    mine = [call for call in wanted(tmp_path / "control.jsonl") if call["call"] == long.call_id]
    assert len(mine) == 2, "it arrived anew when it had moved"
    sampled = mine[1]["length"] - mine[0]["length"]
    assert sampled == 2, "what it had sampled"
    assert [call["expected"] for call in mine] == [expected, expected - sampled]
    assert all(call["tail"] for call in mine)
    report = replay(tmp_path / "control.jsonl", PROGRAMS["control"])
    assert report.equal
    assert any(isinstance(e, Decision) and e.port.endswith("demo.placed") for e in report.runs[0].run.entries)

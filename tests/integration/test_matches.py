"""`gateway episodes match`: what a person sees of matches that are played, that fail, and that wait for a place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli import app
from headgate.client import Task
from headgate.client.matches import Matches, Player
from tests.harness.agents import one_call
from tests.harness.gateways import RunningGateway, gateway_of
from tests.harness.waiting import within

PLAYS = """
from tests.harness.agents import one_call

async def play(task, players):
    assert len({player.api_key for player in players.values()}) == 2
    for player in players.values():
        await one_call(player.base_url, player.api_key)
    return {"first": 1.0, "second": 0.0}

async def fail(task, players):
    raise RuntimeError("the board broke")
"""


@pytest.fixture
async def gateway(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    models: dict[str, dict[str, Any]] = {"red": {}, "blue": {}}
    async with gateway_of(tiny_model, tmp_path, models) as (running, _):
        yield running


async def matched(gateway: RunningGateway, work: Path, play: str, *more: str) -> Result:
    (work / "plays.py").write_text(PLAYS)
    (work / "tasks.jsonl").write_text('{"task_id": "one"}\n{"task_id": "two"}\n')
    argv = ["episodes", "match", "--gateway", gateway.url, "--agent", f"{work}/plays.py:{play}"]
    argv += ["--tasks", str(work / "tasks.jsonl"), "--players", "first=red,second=blue", "--group-size", "1"]
    return await asyncio.to_thread(CliRunner().invoke, app, [*argv, *more])


async def test_each_player_is_rewarded_in_an_episode_of_its_model(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    done = await matched(gateway, tmp_path, "play", "--mode", "eval")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert {player: found["reward_mean"] for player, found in summary.items()} == {
        "first": 1.0,
        "second": 0.0,
    }
    rows = await gateway.admin.episodes(mode="eval")
    assert sorted((row["model"], row["reward"]) for row in rows) == [("blue", 0.0)] * 2 + [("red", 1.0)] * 2


async def test_the_reason_of_a_failed_match_is_printed_once(gateway: RunningGateway, tmp_path: Path) -> None:
    done = await matched(gateway, tmp_path, "fail", "--mode", "eval")
    assert done.exit_code == 1
    assert done.stderr.count("failed: RuntimeError: the board broke") == 1
    assert {found["failed"] for found in json.loads(done.stdout).values()} == {2}


async def test_players_that_wait_for_a_place_in_a_batch_report_it(gateway: RunningGateway) -> None:
    """Each model has room for one group until it is trained: the second task waits in both players."""
    reported = asyncio.Event()

    async def play(task: dict[str, Any], players: dict[str, Player]) -> dict[str, Any]:
        for player in players.values():
            await one_call(player.base_url, player.api_key)
        return {"first": 1.0, "second": 0.0}

    def wait(what: str) -> None:
        if "first: no slot is free" in what and "second: no slot is free" in what:
            reported.set()

    players = {"first": "red", "second": "blue"}
    matches = Matches(gateway.admin, play, players, on_wait=wait, group_size=1)
    await matches.run([Task("one", {})])
    playing = asyncio.create_task(matches.run([Task("two", {})]))
    try:
        async with within("both players wait"):
            await reported.wait()
        assert {found["episodes"] for found in matches.summary().values()} == {1}
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


async def test_every_player_begins_with_the_same_task_whatever_comes_to_the_gateway_first(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each model has room for one group, and the request for the first task comes late from one of the players."""
    played: list[str] = []
    over, opening = asyncio.Event(), gateway.admin.open_episode

    async def play(task: dict[str, Any], players: dict[str, Player]) -> dict[str, Any]:
        played.append(task["name"])
        for player in players.values():
            await one_call(player.base_url, player.api_key)
        return {"first": 1.0, "second": 0.0}

    async def late(task_id: str, *given: Any, model: str, **more: Any) -> Any:
        if (task_id, model) == ("one", "blue"):
            await asyncio.sleep(0.5)  # noqa: TID251 - simulates work
        return await opening(task_id, *given, model=model, **more)

    monkeypatch.setattr(gateway.admin, "open_episode", late)
    players = {"first": "red", "second": "blue"}
    matches = Matches(gateway.admin, play, players, on_outcome=lambda _: over.set(), group_size=1)
    playing = asyncio.create_task(matches.run([Task(name, {"name": name}) for name in ("one", "two")]))
    try:
        async with within("a match is over"):
            await over.wait()
        assert played == ["one"]
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

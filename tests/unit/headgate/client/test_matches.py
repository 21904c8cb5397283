"""Tables: who plays whom, what a match earns in each player, and how it fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headgate.client.admin import GatewayClient
from headgate.client.agents import AgentCrashed, Reward, Task
from headgate.client.kept_order import KeptOrder
from headgate.client.matches import Matches, MatchMaker, Player, parse_players
from headgate.client.order import Passes, TaskOrder
from headgate.client.outcomes import EpisodeOutcome
from tests.harness.waiting import result_of, until
from tests.unit.headgate.client.conftest import FakeGateway

ONE, TWO = Task("one", {"q": 1}), Task("two", {"q": 2})


def playing(match_maker: MatchMaker, player: str, task: Task, key: str) -> asyncio.Task[Reward | None]:
    return asyncio.create_task(match_maker.agent(player)(task, f"http://{player}/v1", key), name=key)


async def test_one_of_each_player_plays_the_same_task_once_and_each_gets_its_own_reward() -> None:
    played: list[tuple[int, str, str]] = []

    async def play(task: dict[str, Any], players: dict[str, Player]) -> dict[str, Any]:
        played.append((task["q"], players["a"].api_key, players["b"].api_key))
        return {"a": 1.0, "b": {"reward": -1.0, "components": {"steps": 2.0}}}

    match_maker = MatchMaker(play, ["a", "b"])
    first = [
        playing(match_maker, "a", ONE, "a1"),
        playing(match_maker, "a", TWO, "a2"),
        playing(match_maker, "b", TWO, "b1"),
    ]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    last = playing(match_maker, "b", ONE, "b2")
    rewards = await asyncio.gather(*first, last)
    assert played == [(2, "a2", "b1"), (1, "a1", "b2")]
    assert [reward and reward.reward for reward in rewards] == [1.0, 1.0, -1.0, -1.0]
    assert rewards[3] == Reward(-1.0, {"steps": 2.0})


@pytest.mark.parametrize("response", [{"a": 1.0}, {"a": 1.0, "b": "much"}, LookupError("no such move")])
async def test_a_match_that_fails_fails_in_every_seat(response: Any) -> None:
    async def play(task: dict[str, Any], players: dict[str, Player]) -> Any:
        if isinstance(response, Exception):
            raise response
        return response

    match_maker = MatchMaker(play, ["a", "b"])
    both = await asyncio.gather(
        playing(match_maker, "a", ONE, "a1"), playing(match_maker, "b", ONE, "b1"), return_exceptions=True
    )
    assert {type(error) for error in both} == {
        type(response) if isinstance(response, Exception) else AgentCrashed
    }


def test_a_player_without_rewards_has_no_mean() -> None:
    async def play(task: dict[str, Any], players: dict[str, Player]) -> dict[str, Any]:
        return {}

    matches = Matches(GatewayClient("http://127.0.0.1:1"), play, {"a": "m", "b": "m"})
    matches._count("a", EpisodeOutcome("t", "g", "ep-1", 0.0))
    assert {player: row["reward_mean"] for player, row in matches.summary().items()} == {"a": 0.0, "b": None}


async def test_one_who_is_alone_leaves_and_one_who_leaves_ends_the_match() -> None:
    begun = asyncio.Event()

    async def play(task: dict[str, Any], players: dict[str, Player]) -> dict[str, Any]:
        begun.set()
        await asyncio.Event().wait()
        return {}

    alone = MatchMaker(play, ["a", "b"], partner_s=0.01)
    with pytest.raises(AgentCrashed, match=r"no match within 0\.01 s") as crashed:
        await alone.agent("a")(ONE, "http://a/v1", "a1")
    assert crashed.value.reason == "no_partner"

    match_maker = MatchMaker(play, ["a", "b"])
    leaving, staying = playing(match_maker, "a", ONE, "a1"), playing(match_maker, "b", ONE, "b1")
    await until(begun.is_set, "they play")
    leaving.cancel()
    with pytest.raises(AgentCrashed, match="another player left") as crashed:
        await staying
    assert crashed.value.reason == "no_partner"


@pytest.mark.parametrize(
    ("text", "words"),
    [("a=x", "NAME=MODEL,NAME=MODEL"), ("a=x,a=y", "each name once"), ("a=x,b=x", "a model of its own")],
)
def test_players_that_make_no_match_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_players(text)
    assert parse_players("first = red, second=blue") == {"first": "red", "second": "blue"}


async def test_matches_that_are_started_again_go_on_in_the_order_of_the_first(
    gateway: FakeGateway, client: GatewayClient, tmp_path: Path
) -> None:
    tasks = [Task(f"t{i}", {"task_id": f"t{i}"}) for i in range(6)]
    played: list[str] = []

    async def run(matches: int, order: TaskOrder) -> None:
        stop = asyncio.Event()
        last = len(played) + matches

        async def play(task: dict[str, Any], players: dict[str, Player]) -> dict[str, Any]:
            if len(played) < last:
                played.append(task["task_id"])
                return dict.fromkeys(players, 1.0)
            stop.set()
            return await asyncio.Event().wait()

        kind: dict[str, Any] = {"order": order, "concurrency": 1}
        running = asyncio.create_task(
            Matches(client, play, {"a": "red", "b": "blue"}, **kind).run(tasks, stop), name="matches"
        )
        await result_of(stop.wait(), "one match more has begun")
        running.cancel()
        await asyncio.wait({running})

    await run(4, KeptOrder(Passes(tasks, 7), tmp_path / "order.json"))
    await run(5, KeptOrder(Passes(tasks, 7), tmp_path / "order.json"))
    passes = Passes(tasks, 7)
    assert played == [passes.next().task_id for _ in range(9)]

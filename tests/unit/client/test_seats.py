"""Tables: who plays whom, what a match earns in each seat, and how it fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.client.admin import GatewayClient
from gateway.client.agents import AgentCrashed, Reward, Task
from gateway.client.outcomes import EpisodeOutcome
from gateway.client.seats import Matches, Seat, Table, orders_of, parse_seats
from tests.harness.waiting import until

ONE, TWO = Task("one", {"q": 1}), Task("two", {"q": 2})


def sitting(table: Table, seat: str, task: Task, key: str) -> asyncio.Task[Reward | None]:
    return asyncio.create_task(table.agent(seat)(task, f"http://{seat}/v1", key), name=key)


async def test_one_of_each_seat_plays_the_same_task_once_and_each_gets_its_own_reward() -> None:
    played: list[tuple[int, str, str]] = []

    async def play(task: dict[str, Any], seats: dict[str, Seat]) -> dict[str, Any]:
        played.append((task["q"], seats["a"].api_key, seats["b"].api_key))
        return {"a": 1.0, "b": {"reward": -1.0, "components": {"steps": 2.0}}}

    table = Table(play, ["a", "b"])
    first = [sitting(table, "a", ONE, "a1"), sitting(table, "a", TWO, "a2"), sitting(table, "b", TWO, "b1")]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    last = sitting(table, "b", ONE, "b2")
    rewards = await asyncio.gather(*first, last)
    assert played == [(2, "a2", "b1"), (1, "a1", "b2")]
    assert [reward and reward.reward for reward in rewards] == [1.0, 1.0, -1.0, -1.0]
    assert rewards[3] == Reward(-1.0, {"steps": 2.0})


@pytest.mark.parametrize("answer", [{"a": 1.0}, {"a": 1.0, "b": "much"}, LookupError("no such move")])
async def test_a_match_that_fails_fails_in_every_seat(answer: Any) -> None:
    async def play(task: dict[str, Any], seats: dict[str, Seat]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    table = Table(play, ["a", "b"])
    both = await asyncio.gather(
        sitting(table, "a", ONE, "a1"), sitting(table, "b", ONE, "b1"), return_exceptions=True
    )
    assert {type(error) for error in both} == {
        type(answer) if isinstance(answer, Exception) else AgentCrashed
    }


def test_a_seat_without_rewards_has_no_mean() -> None:
    async def play(task: dict[str, Any], seats: dict[str, Seat]) -> dict[str, Any]:
        return {}

    matches = Matches(GatewayClient("http://127.0.0.1:1"), play, {"a": "m", "b": "m"})
    matches._count("a", EpisodeOutcome("t", "g", "ep-1", 0.0))
    assert {seat: row["reward_mean"] for seat, row in matches.summary().items()} == {"a": 0.0, "b": None}


async def test_one_who_is_alone_leaves_and_one_who_leaves_ends_the_match() -> None:
    begun = asyncio.Event()

    async def play(task: dict[str, Any], seats: dict[str, Seat]) -> dict[str, Any]:
        begun.set()
        await asyncio.Event().wait()
        return {}

    alone = Table(play, ["a", "b"], partner_s=0.01)
    with pytest.raises(AgentCrashed, match="nobody took the other seats") as crashed:
        await alone.agent("a")(ONE, "http://a/v1", "a1")
    assert crashed.value.reason == "no_partner"

    table = Table(play, ["a", "b"])
    leaving, staying = sitting(table, "a", ONE, "a1"), sitting(table, "b", ONE, "b1")
    await until(begun.is_set, "they play")
    leaving.cancel()
    with pytest.raises(AgentCrashed, match="another seat left") as crashed:
        await staying
    assert crashed.value.reason == "no_partner"


@pytest.mark.parametrize(
    ("text", "said"),
    [("a=x", "NAME=MODEL,NAME=MODEL"), ("a=x,a=y", "each name once"), ("a=x,b=x", "a model of its own")],
)
def test_seats_that_make_no_match_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_seats(text)
    assert parse_seats("first = red, second=blue") == {"first": "red", "second": "blue"}


def test_seats_that_start_again_continue_together_where_the_first_one_was(tmp_path: Path) -> None:
    tasks, state = [Task(f"t{i}", {}) for i in range(5)], tmp_path / "order.json"
    before = orders_of(["a", "b"], tasks, 7, state)
    played = [before["a"].next().task_id for _ in range(3)]
    for task_id in played:
        before["a"].ended(task_id, None)
    after = orders_of(["a", "b"], tasks, 7, state)
    left = {seat: [order.next().task_id for _ in range(2)] for seat, order in after.items()}
    assert left["a"] == left["b"]
    assert {*left["a"]} == {task.task_id for task in tasks} - {*played}

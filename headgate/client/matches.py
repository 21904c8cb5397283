"""Matches of several trained models: each is a player with its own episode of the same task, and one outcome rewards all.

Each player has its own runner (`EpisodeRunner`), so groups, retries and bounds are those of its model. `MatchMaker` pairs one
episode of each player for the same task, and has them played once. Invariants:
- an episode is in one match at a time;
- a match that fails fails for every player; an episode that finds no partner in time is left out, and did not fail;
- every player opens its episodes in the order of the tasks, because with room for few groups two players that began with
  different ones would wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headgate.client.admin import GatewayClient
from headgate.client.agents import (
    AgentCrashed,
    Reward,
    Task,
    overrun,
    reward_of,
)
from headgate.client.driver import EpisodeRunner
from headgate.client.foreign import Overran, run_foreign
from headgate.client.order import SharedOrder, TaskOrder
from headgate.client.outcomes import EpisodeOutcome
from headgate.end_reasons import NO_PARTNER

PARTNER_S = 120.0


@dataclass(frozen=True, slots=True)
class Player:
    """The access to one player's model, in its episode of this match."""

    base_url: str
    api_key: str


Play = Callable[[dict[str, Any], dict[str, Player]], Awaitable[Mapping[str, Any]]]
"""`async def play(task, players)`: the outcome by player, each a number or an object with `reward`, as an agent returns it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    player: Player
    reward: asyncio.Future[Reward | None]


class MatchMaker:
    """Calls `play` once for one episode of each of `players`. A player waits at most `partner_s` for the others, and a match may
    take `timeout_s`."""

    def __init__(
        self, play: Play, players: Sequence[str], partner_s: float = PARTNER_S, timeout_s: float = 600.0
    ) -> None:
        if len(set(players)) < 2:
            raise ValueError("a match needs two players or more, each with a name of its own")
        self._play = play
        self._players = tuple(players)
        self._partner_s = partner_s
        self._timeout_s = timeout_s
        self._waiting: dict[str, dict[str, deque[_Waiting]]] = {}
        """The episodes that wait, by task and player; first come, first served."""
        self._matches: set[asyncio.Task[None]] = set()

    def agent(self, player: str) -> PlayerAgent:
        """Return the agent of a player, for that player's runner."""
        return PlayerAgent(self, player)

    async def play(self, name: str, task: Task, player: Player) -> Reward | None:
        """Play a task as a player, and return that player's reward."""
        waiting = _Waiting(player, asyncio.get_running_loop().create_future())
        places = self._waiting.setdefault(task.task_id, defaultdict(deque))
        places[name].append(waiting)
        self._begin(task)
        try:
            await asyncio.wait({waiting.reward}, timeout=self._partner_s if waiting in places[name] else None)
            if waiting not in places[name]:
                return await waiting.reward
            raise AgentCrashed(
                f"no match within {self._partner_s:g} s: the other players have no episode", NO_PARTNER
            )
        finally:
            waiting.reward.cancel()
            if waiting in places[name]:
                places[name].remove(waiting)

    def _begin(self, task: Task) -> None:
        """Start a match if every player has an episode."""
        places = self._waiting[task.task_id]
        if not all(places[player] for player in self._players):
            return
        waiting = {player: places[player].popleft() for player in self._players}
        match = asyncio.create_task(self._match(task, waiting), name=f"match-{task.task_id}")
        self._matches.add(match)
        match.add_done_callback(self._matches.discard)
        for one in waiting.values():  # a player who leaves ends the match
            one.reward.add_done_callback(lambda reward: reward.cancelled() and match.cancel())

    async def _match(self, task: Task, waiting: Mapping[str, _Waiting]) -> None:
        outcome: Mapping[str, Reward | None] | Exception
        try:
            outcome = self._rewards(await self._played(task, waiting))
        except asyncio.CancelledError:
            outcome = AgentCrashed("another player left the match", NO_PARTNER)
        except Exception as error:
            outcome = error
        for name, one in waiting.items():
            if one.reward.done():
                continue
            if isinstance(outcome, Exception):
                one.reward.set_exception(outcome)
            else:
                one.reward.set_result(outcome[name])

    async def _played(self, task: Task, waiting: Mapping[str, _Waiting]) -> Any:
        work = partial(self._play, task.data, {name: one.player for name, one in waiting.items()})
        try:
            return await run_foreign(work, f"play-{task.task_id}", limit_s=self._timeout_s, children=True)
        except Overran as error:
            raise overrun("play a match", self._timeout_s) from error

    def _rewards(self, response: Mapping[str, Any]) -> dict[str, Reward | None]:
        if not isinstance(response, Mapping) or {*response} != {*self._players}:
            raise AgentCrashed(
                f"a match returns a reward for each of {', '.join(self._players)}, not {str(response)[:200]}"
            )
        return {player: reward_of(response[player]) for player in self._players}


class PlayerAgent:
    """One player as an agent of the driver."""

    def __init__(self, match_maker: MatchMaker, player: str) -> None:
        self._match_maker = match_maker
        self._player = player

    async def __call__(self, task: Task, base_url: str, api_key: str) -> Reward | None:
        return await self._match_maker.play(self._player, task, Player(base_url, api_key))

    async def close(self) -> None:
        """Nothing outlives a call."""


class Matches:
    """Runs one runner for each player concurrently; `players`: the trained model of each. `timeout_s`: of a match. `order`: of
    the tasks of a run without an end. `kind`: arguments of EpisodeRunner.

    `on_outcome` is called at the end of every episode; `on_wait` with what the players wait for before their episodes are
    opened, when that changes; empty: for nothing.
    """

    def __init__(
        self,
        client: GatewayClient,
        play: Play,
        players: Mapping[str, str],
        *,
        on_outcome: Callable[[EpisodeOutcome], None] | None = None,
        on_wait: Callable[[str], None] | None = None,
        timeout_s: float = 600.0,
        order: TaskOrder | None = None,
        **kind: Any,
    ) -> None:
        match_maker = MatchMaker(play, [*players], timeout_s=timeout_s)
        orders = [None] * len(players) if order is None else SharedOrder(order, len(players)).views
        self._on_outcome = on_outcome
        self._on_wait = on_wait
        self._waits = dict.fromkeys(players, "")
        self._counts: dict[str, Counter[str]] = {player: Counter() for player in players}
        self._earned: dict[str, float] = dict.fromkeys(players, 0.0)
        self._runners = {
            player: EpisodeRunner(
                client,
                match_maker.agent(player),
                model=model,
                on_outcome=partial(self._count, player),
                on_wait=partial(self._wait, player),
                in_order=True,
                order=view,
                **kind,
            )
            for (player, model), view in zip(players.items(), orders, strict=True)
        }

    async def run(self, tasks: Sequence[Task], stop: asyncio.Event | None = None) -> None:
        """Play every task once, or repeatedly until `stop` is set. Raise GatewayUnreachable or RunStopped."""
        try:
            async with asyncio.TaskGroup() as runs:
                for player, runner in self._runners.items():
                    work = runner.run(tasks) if stop is None else runner.run_forever(tasks, stop)
                    runs.create_task(_ended(work), name=f"player-{player}")
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    def summary(self) -> dict[str, dict[str, float | None]]:
        """Return how the episodes of each player ended; `reward_mean` is None if none was rewarded."""
        return {
            player: {
                "episodes": counts.total(),
                "failed": counts["failed"],
                "aborted": counts["aborted"],
                "reward_mean": self._earned[player] / counts["rewarded"] if counts["rewarded"] else None,
            }
            for player, counts in self._counts.items()
        }

    def _count(self, player: str, outcome: EpisodeOutcome) -> None:
        if outcome.reward is not None:
            self._earned[player] += outcome.reward
            self._counts[player]["rewarded"] += 1
        else:
            self._counts[player]["failed" if outcome.aborted is None else "aborted"] += 1
        if self._on_outcome is not None:
            self._on_outcome(outcome)

    def _wait(self, player: str, what: str) -> None:
        self._waits[player] = what
        if self._on_wait is not None:
            self._on_wait("; ".join(f"{name}: {what}" for name, what in self._waits.items() if what))


async def _ended(work: Awaitable[Any]) -> None:
    await work


def parse_players(text: str) -> dict[str, str]:
    """Return the models by player of `NAME=MODEL,NAME=MODEL`. Raise ValueError."""
    pairs = [part.partition("=") for part in text.split(",")]
    players = {name.strip(): model.strip() for name, _, model in pairs}
    if len(players) < 2 or len(players) != len(pairs) or not all((*players, *players.values())):
        raise ValueError(f"players are NAME=MODEL,NAME=MODEL, each name once, not {text!r}")
    if len({*players.values()}) != len(players):
        raise ValueError(
            "each player needs a model of its own: two players of one model would wait for each other's place in its batch"
        )
    return players

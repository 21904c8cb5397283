"""Matches of several trained models: each has a seat in the same task, an episode of its own, and a reward from one outcome.

Each seat has a runner of its own (`EpisodeRunner`), so groups, retries and bounds are those of its model. `Table` brings together
one episode of each seat for the same task, and has them played once. Invariants: an episode is in one match at a time; a match
that fails fails in every seat; one that finds no partner in time is left out, and did not fail; every seat opens its episodes in
the order of the tasks, because with room for few groups two seats that began with different ones would wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gateway.client.admin import GatewayClient
from gateway.client.agents import AgentCrashed, Reward, Task, overrun, reward_of
from gateway.client.driver import EpisodeRunner
from gateway.client.foreign import Overran, run_foreign
from gateway.client.kept_order import KeptOrder
from gateway.client.order import Passes, TaskOrder
from gateway.client.outcomes import EpisodeOutcome
from gateway.end_reasons import NO_PARTNER

PARTNER_S = 120.0


@dataclass(frozen=True, slots=True)
class Seat:
    """The model of one player, in the episode of this match."""

    base_url: str
    api_key: str


Play = Callable[[dict[str, Any], dict[str, Seat]], Awaitable[Mapping[str, Any]]]
"""`async def play(task, seats)`: the outcome by seat, each a number or an object with `reward`, as an agent answers it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    seat: Seat
    reward: asyncio.Future[Reward | None]


class Table:
    """Has `play` called once for one episode of each of `seats`. A player waits at most `partner_s` for the others, and a match
    takes at most `timeout_s`."""

    def __init__(
        self, play: Play, seats: Sequence[str], partner_s: float = PARTNER_S, timeout_s: float = 600.0
    ) -> None:
        if len(set(seats)) < 2:
            raise ValueError("a match needs two seats or more, each with a name of its own")
        self._play = play
        self._seats = tuple(seats)
        self._partner_s = partner_s
        self._timeout_s = timeout_s
        self._waiting: dict[str, dict[str, deque[_Waiting]]] = {}
        """The players that wait, by task and seat; who came first plays first."""
        self._matches: set[asyncio.Task[None]] = set()

    def agent(self, seat: str) -> SeatAgent:
        """The agent of a seat, for that seat's runner."""
        return SeatAgent(self, seat)

    async def sit(self, name: str, task: Task, seat: Seat) -> Reward | None:
        """Plays a task in a seat; returns that seat's reward."""
        waiting = _Waiting(seat, asyncio.get_running_loop().create_future())
        places = self._waiting.setdefault(task.task_id, defaultdict(deque))
        places[name].append(waiting)
        self._begin(task)
        try:
            await asyncio.wait({waiting.reward}, timeout=self._partner_s if waiting in places[name] else None)
            if waiting not in places[name]:
                return await waiting.reward
            raise AgentCrashed(f"nobody took the other seats within {self._partner_s:g} s", NO_PARTNER)
        finally:
            waiting.reward.cancel()
            if waiting in places[name]:
                places[name].remove(waiting)

    def _begin(self, task: Task) -> None:
        """Begins a match if every seat is taken."""
        places = self._waiting[task.task_id]
        if not all(places[seat] for seat in self._seats):
            return
        players = {seat: places[seat].popleft() for seat in self._seats}
        match = asyncio.create_task(self._match(task, players), name=f"match-{task.task_id}")
        self._matches.add(match)
        match.add_done_callback(self._matches.discard)
        for player in players.values():  # one who leaves ends the match
            player.reward.add_done_callback(lambda reward: reward.cancelled() and match.cancel())

    async def _match(self, task: Task, players: Mapping[str, _Waiting]) -> None:
        outcome: Mapping[str, Reward | None] | Exception
        try:
            outcome = self._rewards(await self._played(task, players))
        except asyncio.CancelledError:
            outcome = AgentCrashed("another seat left the match", NO_PARTNER)
        except Exception as error:
            outcome = error
        for name, player in players.items():
            if player.reward.done():
                continue
            if isinstance(outcome, Exception):
                player.reward.set_exception(outcome)
            else:
                player.reward.set_result(outcome[name])

    async def _played(self, task: Task, players: Mapping[str, _Waiting]) -> Any:
        work = partial(self._play, task.data, {name: player.seat for name, player in players.items()})
        try:
            return await run_foreign(work, f"play-{task.task_id}", limit_s=self._timeout_s, children=True)
        except Overran as error:
            raise overrun("play a match", self._timeout_s) from error

    def _rewards(self, answer: Mapping[str, Any]) -> dict[str, Reward | None]:
        if not isinstance(answer, Mapping) or {*answer} != {*self._seats}:
            raise AgentCrashed(
                f"a match answers a reward for each of {', '.join(self._seats)}, not {str(answer)[:200]}"
            )
        return {seat: reward_of(answer[seat]) for seat in self._seats}


class SeatAgent:
    """One seat of a table as an agent of the driver."""

    def __init__(self, table: Table, seat: str) -> None:
        self._table = table
        self._seat = seat

    async def __call__(self, task: Task, base_url: str, api_key: str) -> Reward | None:
        return await self._table.sit(self._seat, task, Seat(base_url, api_key))

    async def close(self) -> None:
        """Nothing outlives a call."""


class Matches:
    """A runner for each seat of a table, all at the same time; `seats`: the trained model of each. `orders`: of each seat's
    tasks, for a run without end. `timeout_s`: of a match. `kind`: arguments of EpisodeRunner.

    `on_outcome` is called at the end of every episode; `on_wait` with what the seats wait for before their episodes are
    opened, when that changes; empty: for nothing.
    """

    def __init__(
        self,
        client: GatewayClient,
        play: Play,
        seats: Mapping[str, str],
        *,
        on_outcome: Callable[[EpisodeOutcome], None] | None = None,
        on_wait: Callable[[str], None] | None = None,
        timeout_s: float = 600.0,
        orders: Mapping[str, TaskOrder] | None = None,
        **kind: Any,
    ) -> None:
        table = Table(play, [*seats], timeout_s=timeout_s)
        self._on_outcome = on_outcome
        self._on_wait = on_wait
        self._waits = dict.fromkeys(seats, "")
        self._counts: dict[str, Counter[str]] = {seat: Counter() for seat in seats}
        self._earned: dict[str, float] = dict.fromkeys(seats, 0.0)
        self._runners = {
            seat: EpisodeRunner(
                client,
                table.agent(seat),
                model=model,
                on_outcome=partial(self._count, seat),
                on_wait=partial(self._wait, seat),
                in_order=True,
                order=orders[seat] if orders else None,
                **kind,
            )
            for seat, model in seats.items()
        }

    async def run(self, tasks: Sequence[Task], stop: asyncio.Event | None = None) -> None:
        """Plays every task once, or again and again until `stop` is set. Raises GatewayUnreachable or RunStopped."""
        try:
            async with asyncio.TaskGroup() as seats:
                for seat, runner in self._runners.items():
                    work = runner.run(tasks) if stop is None else runner.run_forever(tasks, stop)
                    seats.create_task(_ended(work), name=f"seat-{seat}")
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    def summary(self) -> dict[str, dict[str, float | None]]:
        """Return how the episodes of each seat ended; `reward_mean` is None if none was rewarded."""
        return {
            seat: {
                "episodes": counts.total(),
                "failed": counts["failed"],
                "aborted": counts["aborted"],
                "reward_mean": self._earned[seat] / counts["rewarded"] if counts["rewarded"] else None,
            }
            for seat, counts in self._counts.items()
        }

    def _count(self, seat: str, outcome: EpisodeOutcome) -> None:
        if outcome.reward is not None:
            self._earned[seat] += outcome.reward
            self._counts[seat]["rewarded"] += 1
        else:
            self._counts[seat]["failed" if outcome.aborted is None else "aborted"] += 1
        if self._on_outcome is not None:
            self._on_outcome(outcome)

    def _wait(self, seat: str, what: str) -> None:
        self._waits[seat] = what
        if self._on_wait is not None:
            self._on_wait("; ".join(f"{name}: {what}" for name, what in self._waits.items() if what))


async def _ended(work: Awaitable[Any]) -> None:
    await work


def orders_of(
    seats: Iterable[str], tasks: Sequence[Task], seed: int, state: Path | None
) -> dict[str, TaskOrder]:
    """Return equal passes over the tasks for each seat. `state`: the file that keeps the first seat's place for the next
    start, from which all seats continue. Raise ValueError if the file is not a state."""
    first, *others = seats
    kept = Passes(tasks, seed)
    orders: dict[str, TaskOrder] = {first: kept if state is None else KeptOrder(kept, state)}
    for seat in others:
        passes = orders[seat] = Passes(tasks, seed)
        passes.restore(kept.state())
    return orders


def parse_seats(text: str) -> dict[str, str]:
    """`NAME=MODEL,NAME=MODEL` as models by seat. Raises ValueError."""
    pairs = [part.partition("=") for part in text.split(",")]
    seats = {name.strip(): model.strip() for name, _, model in pairs}
    if len(seats) < 2 or len(seats) != len(pairs) or not all((*seats, *seats.values())):
        raise ValueError(f"seats are NAME=MODEL,NAME=MODEL, each name once, not {text!r}")
    if len({*seats.values()}) != len(seats):
        raise ValueError(
            "each seat needs a model of its own: two seats of one model would wait for each other's place in its batch"
        )
    return seats

"""The end of an episode, with trouble at every await: a store that refuses, a call that cannot be stopped, a client that leaves.

The truth is what is committed: the ledger is that of a pure rule which is fed with the stored events, and a place in it that a
member holds for ever would hold its batch for ever.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from sqlalchemy import select

from gateway.episodes.closing_state import ClosingState, Outcome, Phase
from gateway.episodes.episodes import Episodes
from gateway.grading.grading import Grade, Grading
from gateway.store.models import EpisodeRow
from gateway.store.sampled import Sampled
from gateway.training_feed.ledger import StoredLedger
from headgate.errors import GatewayError, Unavailable
from headgate.types import EpisodeRequest
from tests.faults.virtual.clock import Clock, VirtualLoop
from tests.faults.virtual.ledgers import RULE, SETTINGS, replayed
from tests.faults.virtual.stores import HandDatabase, open_store, sqlite_store

PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def _calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every episode sampled something."""
    found = Sampled(1, calls=Counter({"m": 1}))
    for module in ("closing", "episodes"):
        monkeypatch.setattr(f"gateway.episodes.{module}.sampled", lambda *_: found)


class Trouble(HandDatabase):
    """A store that refuses the nth write and some after it."""

    writes, first, times = 0, 0, 0

    def check_write(self) -> None:
        self.writes += 1
        if self.first <= self.writes < self.first + self.times:
            raise Unavailable("too many writes wait for the database", retry_after=5.0, code="store_busy")


class RunningCall:
    """A call whose stop takes a while, and fails when the store does."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def stop(self, _reason: GatewayError) -> None:
        await asyncio.sleep(0.1)
        self.world.database.check()


class Trees:
    """Stands for a recorder: the episodes whose trees are in memory."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    def begin(self, episode_id: str) -> None:
        self.held.add(episode_id)

    def forget(self, episode_id: str) -> None:
        self.held.discard(episode_id)


class Grader:
    """Stands for `Grading`: takes some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def grades(self, _model: str) -> bool:
        return True

    async def grade(self, _episode_id: str, _model: str) -> Grade:
        await asyncio.sleep(self.seconds)
        return Grade(1.0, {})


class World:
    """One coordinator, and a group of two with room for a third that races."""

    def __init__(self, url: str, grading_s: float = 1.0) -> None:
        self.clock = Clock()
        self.loop = VirtualLoop(self.clock)
        self.store = open_store(url)
        self.database = Trouble(self.store, self.loop)
        self.fenced = self.database.fenced(self.database.claim("c"))
        self.database.at_once = True
        self.trees = Trees()
        self.loop.run(self._start(Grader(grading_s)), PATIENCE_S)

    async def _start(self, grader: Grader) -> None:
        self.ledger = await StoredLedger.load(self.fenced, RULE, "m")
        grading = cast(Grading, grader)
        self.episodes = Episodes(SETTINGS, self.fenced, {"m": self.ledger}, [cast(Any, self.trees)], grading)

    async def open(self, mode: Any = "train") -> str:
        """One more member, with a call that runs."""
        opened = await self.episodes.open(EpisodeRequest("t", "g", 2, mode, "m"), 0.0)
        live = self.episodes._live.get(opened.episode_id)
        if live is not None:
            live.calls.add(cast(Any, RunningCall(self)))
        return opened.episode_id

    def members(self) -> dict[str, str]:
        """Return each member's end, from the committed events alone."""
        groups = self.database.look(replayed).groups()
        return {name: state for group in groups for name, state in group.members.items()}

    def rows(self) -> dict[str, Any]:
        rows = self.database.look(lambda c: list(c.execute(select(EpisodeRow.__table__))))
        return {row.id: row for row in rows}

    def check_ended(self, *episodes: str) -> None:
        """Check that these episodes have ended in every part that knows them, and that all others are in exactly one state."""
        rows, members = self.rows(), self.members()
        live, over = set(self.episodes._live), set(self.episodes._closing.unclosed)
        assert [rows[episode].state for episode in episodes] == ["closed"] * len(episodes)
        assert not [e for e in episodes if members.get(e) in ("open", "grading")], (
            "its place is held for ever"
        )
        assert not over and not live & set(episodes)
        open_now = {name for name, row in rows.items() if row.state == "open"}
        assert open_now == live == self.trees.held
        assert open_now == {name for name, state in members.items() if state in ("open", "grading")} | {
            name for name in open_now if rows[name].mode == "eval"
        }

    def close(self) -> None:
        self.loop.end()
        self.database.die()
        self.store.dispose()


Ends = Callable[[World, list[str]], Awaitable[Any]]


async def _surplus(world: World, names: list[str]) -> None:
    """Reward two, so that the third is given up; it is being graded, or ends, or runs."""
    for name in names[:2]:
        if name in world.episodes._live:
            await world.episodes.reward(name, 1.0, None, final=True)


async def _both(world: World, names: list[str]) -> None:
    """Give the third up while it is being graded."""
    if names[2] in world.episodes._live:
        await world.episodes.finish(names[2], 0.0)
    await _surplus(world, names)


ENDS: dict[str, tuple[Ends, int, str]] = {
    "rewarded": (lambda w, names: w.episodes.reward(names[0], 1.0, None, final=True), 1, "train"),
    "abandoned": (lambda w, names: w.episodes.abandon(names[0], "enough"), 1, "train"),
    "graded": (lambda w, names: w.episodes.finish(names[0], 0.0), 1, "train"),
    "evaluated": (lambda w, names: w.episodes.finish(names[0], 0.0), 1, "eval"),
    "surplus": (_surplus, 3, "train"),
    "surplus, graded": (_both, 3, "train"),
}


def run(url: str, case: str, prepare: Callable[[World], None], act: Callable[[World, Any], None]) -> bool:
    """One end with one trouble. False: the trouble came after the end."""
    end, count, mode = ENDS[case]
    world = World(url, grading_s=50.0 if "surplus" in case else 1.0)
    try:
        names = world.loop.run(_opened(world, count, mode), PATIENCE_S)
        prepare(world)
        act(world, lambda: end(world, names))
        world.loop.advance(PATIENCE_S)
        reached = 0 < world.database.first <= world.database.writes
        world.database.first = 0
        if any(
            name in world.episodes._live for name in names
        ):  # it was refused before anything changed: end it again
            world.loop.run(_quietly(end(world, names)), PATIENCE_S)
            world.loop.advance(PATIENCE_S)
        world.check_ended(*names)
        return reached
    finally:
        world.close()


async def _opened(world: World, count: int, mode: str) -> list[str]:
    return [await world.open(mode) for _ in range(count)]


async def _quietly(work: Awaitable[Any]) -> None:
    try:
        await work
    except GatewayError:
        return


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("case", ENDS)
def test_an_end_that_the_store_refuses_at_any_moment_comes_all_the_same(case: str, times: int) -> None:
    for number in itertools.count(1):

        def refuse(world: World) -> None:
            world.database.first, world.database.times = world.database.writes + number, times  # noqa: B023

        with sqlite_store() as url:
            if not run(url, case, refuse, lambda world, end: world.loop.create_task(_quietly(end()))):
                break
    assert number > 2, "there was trouble"


@pytest.mark.parametrize("case", ENDS)
def test_an_end_whose_client_leaves_at_any_moment_comes_all_the_same(case: str) -> None:
    for steps in itertools.count(1):
        gone: list[bool] = []

        def leave(world: World, end: Callable[[], Awaitable[Any]]) -> None:
            task = world.loop.create_task(_quietly(end()))
            for _ in range(steps):  # noqa: B023
                world.loop.call_soon(world.loop.stop)
                world.loop.run_forever()
                world.clock.now += 0.05
            gone.append(task.cancel())  # noqa: B023

        with sqlite_store() as url:
            run(url, case, lambda world: None, leave)
        if not gone[0]:
            break
    assert steps > 2, "a client left"


@pytest.mark.parametrize("leaves", [False, True])
def test_a_member_that_is_given_up_while_its_place_is_committed_is_stopped(leaves: bool) -> None:
    with sqlite_store() as url:
        world = World(url)
        try:
            names = world.loop.run(_opened(world, 2, "train"), PATIENCE_S)
            world.loop.run(world.episodes.reward(names[0], 1.0, None, final=True), PATIENCE_S)
            world.database.at_once = False
            joining = world.loop.create_task(world.open())
            world.loop.settle()
            rewarding = world.loop.create_task(world.episodes.reward(names[1], 1.0, None, final=True))
            world.loop.advance(1.0)
            if leaves:
                joining.cancel()
                world.loop.settle()
            world.database.at_once = True
            world.database.commit()
            world.loop.advance(PATIENCE_S)
            assert rewarding.done() and joining.done()
            (third,) = set(world.rows()) - set(names)
            assert world.rows()[third].reason == "surplus"
            world.check_ended(*names, third)
        finally:
            world.close()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_episode_whose_opener_leaves_while_it_is_committed_is_known(mode: str) -> None:
    with sqlite_store() as url:
        world = World(url)
        try:
            world.database.at_once = False
            opening = world.loop.create_task(world.open(mode))
            world.loop.settle()
            opening.cancel()
            world.loop.settle()
            world.database.at_once = True
            world.database.commit()
            world.loop.advance(1.0)
            assert set(world.rows()) == set(world.episodes._live), "its deadline can end it"
        finally:
            world.close()


def test_every_phase_leads_to_the_end() -> None:
    """Whatever happens in whatever order, and whenever the ledger gives up."""
    rewarded = Outcome("rewarded", {"reward": 1.0, "components": None})
    for outcome, aborted_at in itertools.product((rewarded, Outcome("crashed", {}), None), range(6)):
        ending, seen = ClosingState(), []
        for number in itertools.count():
            if number == aborted_at:
                ending = ending.abort("surplus")
            if ending.phase is Phase.CLOSED:
                break
            seen.append(ending.phase)
            match ending.phase:
                case Phase.OPEN:
                    ending = ending.end(outcome)
                case Phase.STOPPING:
                    ending = ending.stopped()
                case Phase.GRADING:
                    ending = ending.graded(rewarded)
                case _:
                    ending = ending.stored()
        assert len(seen) == len(set(seen)) and seen[-1] is Phase.CLOSING
        assert ending.outcome is not None
        assert ending.given_up == (ending.outcome.reason == "surplus")


@pytest.mark.parametrize("phase", [Phase.FINISHING, Phase.CLOSING])
def test_what_the_ledger_refuses_is_stored_without_it(phase: Phase) -> None:
    rewarded = Outcome("rewarded", {"reward": 1.0, "components": None})
    refused = ClosingState(phase, rewarded if phase is Phase.CLOSING else None).refused()
    assert (refused.phase, refused.given_up) == (Phase.CLOSING, True)
    assert refused.outcome is not None and refused.outcome.reason == "untrained_late"
    assert refused.stored().phase is Phase.CLOSED


def test_an_end_without_calls_stands_in_place_of_a_reward_alone() -> None:
    rewarded, unused = Outcome("rewarded", {"reward": 1.0}), Outcome("no_calls", {"error": "why"})
    for outcome in (rewarded, None):
        ended = ClosingState().end(outcome).stopped(unused)
        assert (ended.phase, ended.outcome) == (Phase.CLOSING, unused), "it is not graded, either"
    crashed = Outcome("agent_failed", {"error": "why"})
    assert ClosingState().end(crashed).stopped(unused).outcome == crashed
    given_up = ClosingState().end(rewarded).abort("surplus").stopped(unused)
    assert given_up.outcome is not None and given_up.outcome.reason == "surplus"


def test_an_episode_ends_once() -> None:
    with pytest.raises(ValueError, match="ends once"):
        ClosingState().end(None).end(None)

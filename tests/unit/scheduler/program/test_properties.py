"""Any fleet, any responses, any order of events: what `watch.py` demands holds, every update ends, every file replays."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.program.events import Step, StepCommand
from tests.unit.scheduler.program.outcomes import OUTCOMES, SETTINGS
from tests.unit.scheduler.program.world import Outcome, World

ENGINES = ["a", "b", "c"]
HAPPENS = st.one_of(
    st.tuples(st.just("run"), st.integers(0, 12)),
    st.tuples(st.just("run"), st.integers(0, 12)),
    st.tuples(st.sampled_from(["add", "remove", "lose", "pause", "resume"]), st.sampled_from(ENGINES)),
    st.tuples(st.just("publish"), st.sampled_from([1, 1, 1, 0, -1])),
    st.tuples(st.just("repeat_results"), st.none()),
)
EVENTS = st.lists(HAPPENS, max_size=25)


def happen(world: World, what: str, about: Any) -> None:
    """One event. A version is published, now and then one that is not newer than the last."""
    match what:
        case "run":
            world.run(about)
        case "publish":
            world.publish(max(1, max(world.watch.published, default=0) + about))
        case "repeat_results":
            world.repeat_results()
        case _:
            getattr(world, what)(about)


def converge(world: World) -> None:
    """Complete every step within a second from now on: every update ends, and every remaining engine gets a last version."""
    world.outcome = lambda do: Outcome()
    for engine in list(world.watch.engines):
        world.resume(engine)
    world.run(400)
    assert [ended.version for ended in world.watch.ends] == world.watch.published
    last = max(world.watch.published, default=0) + 1
    world.publish(last).run(100)
    assert world.watch.ends[-1].version == last
    assert world.watch.ends[-1].live == bool(world.watch.engines)
    assert all(engine.runs == last for engine in world.watch.engines.values())
    assert all(engine.removed is None for engine in world.watch.engines.values())


@settings(deadline=None, max_examples=60)
@given(
    SETTINGS,
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([0, 0, 2]),
    st.sampled_from([20_000, 10**9]),
    OUTCOMES,
    EVENTS,
)
def test_whatever_happens(
    chosen: tuple[dict[str, Any], dict[str, Any]],
    ends_first: bool,
    count: int,
    pinned: int,
    size: int,
    outcomes: dict[Step, list[Outcome]],
    events: list[tuple[str, Any]],
) -> None:
    drawn = {step: iter(those) for step, those in outcomes.items()}

    def outcome(do: StepCommand) -> Outcome:
        return next(drawn.get(do.step, iter(())), Outcome(pinned=pinned))

    world = World(outcome, *chosen, ends_first=ends_first, size=size)
    world.add(*ENGINES[:count])
    for what, about in events:
        happen(world, what, about)
    converge(world)
    world.check_replay()


def test_hashes_do_not_matter() -> None:
    """The decisions are the same in processes that hash strings differently."""
    code = (
        "from tests.unit.scheduler.program.world import World\n"
        "world = World().add(*'abcdef').run(10).lose('d').publish(1).run(80)\n"
        "print(*world.lines, sep='\\n')"
    )
    stories = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(stories) == 1
    assert "version 1 live" in stories.pop()

"""Nodes that are lent and claimed, in the world's virtual time. Each step takes a second by default."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.program.events import Step, StepCommand
from scheduler.program.nodes import NodeAdded
from tests.unit.scheduler.program.outcomes import OUTCOMES, SETTINGS
from tests.unit.scheduler.program.world import MODEL, Outcome, World

T0 = {"a": "t0", "b": "t0"}


def lent(**kwargs: Any) -> World:
    """`r` lives on no node, `a` on `t0`, which is lent; second 10."""
    world = World(homes={"a": "t0"}, **kwargs).add("r", "a").run(4)
    world.release("t0").fill(0).run(6)
    assert world.watch.nodes["t0"].role == "rollout"
    world.story()
    return world


def test_a_node_is_left_alone_until_its_trainer_has_reported() -> None:
    world = World(homes={"a": "t0"}).add("r", "a").fill(0).run(10)
    assert world.story() == [
        "0 t0 is idle",
        "0 r launch 0",
        "0 a sleep 0",
        "1 r label 0",
        "2 r probe 0",
        "3 r open 0",
    ]
    world.release("t0").run(10)
    assert world.story() == [
        "10 t0 is switching",
        "10 a launch 0",
        "11 a label 0",
        "12 a probe 0",
        "13 a open 0",
        "14 t0 is rollout",
    ]
    world.check_replay()


def test_or_until_it_has_been_silent_for_long() -> None:
    world = World(homes={"a": "t0"}).add("r", "a").fill(0).run(49)
    assert world.watch.nodes["t0"].role == "idle"
    world.run(10)
    assert world.watch.nodes["t0"].role == "rollout"


def test_a_claim_calls_it_back_immediately_and_it_comes_back_with_the_newest_weights() -> None:
    world = lent().claim("t0").run(3)
    assert world.story() == ["10 t0 is switching", "10 a sleep 0", "11 t0 is train"]
    world.publish(1).run(10)
    assert [line for line in world.story() if " a " in line or "version" in line] == ["21 version 1 live"]
    world.release("t0").run(8)
    assert world.story() == [
        "23 t0 is switching",
        "23 a wake 1",
        "24 a label 1",
        "25 a probe 1",
        "26 a open 1",
        "27 t0 is rollout",
    ]
    world.check_replay()


def test_an_engine_that_does_not_sleep_is_killed_and_the_claim_is_served() -> None:
    world = lent()
    world.outcome = lambda do: Outcome(after_s=None if do.step == "sleep" else 1)
    world.claim("t0").run(20)
    assert world.story() == ["10 t0 is switching", "10 a sleep 0", "15 a stop 0", "16 t0 is train"]
    world.release("t0").run(3)
    assert world.story()[:2] == ["30 t0 is switching", "30 a launch 0"]


def test_an_engine_that_fails_to_wake_is_started_again() -> None:
    def outcome(do: StepCommand) -> Outcome:
        return Outcome(ok=do.step != "wake")

    world = lent(outcome=outcome).claim("t0").run(3).release("t0").run(10)
    assert [line for line in world.story() if " a " in line][1:5] == [
        "13 a wake 0",
        "14 a stop 0",
        "15 a launch 0",
        "16 a label 0",
    ]
    assert world.watch.nodes["t0"].role == "rollout"


def test_a_node_is_recalled_when_the_batch_is_near_and_not_lent_again_immediately() -> None:
    world = lent()
    for groups in range(9):  # one a second
        world.fill(groups, batch=1).run(1)
    assert world.story() == []
    world.fill(9, batch=1).run(2)  # one is left: 1 s, and putting to sleep was never measured
    assert world.story() == ["19 t0 is switching", "19 a sleep 0", "20 t0 is idle"]
    world.fill(9, batch=1).claim("t0").run(1)
    assert world.story() == ["21 t0 is train"]


@pytest.mark.parametrize(("busy_s", "load_s"), [(4.0, 0.0), (1.0, 3.0)])
def test_a_node_is_recalled_as_much_earlier_as_its_trainer_loads_and_computes(
    busy_s: float, load_s: float
) -> None:
    world = lent().claim("t0").run(3).release("t0", busy_s=busy_s, load_s=load_s).run(5)
    assert world.watch.nodes["t0"].role == "rollout"
    world.story()
    for groups in range(4):  # one a second
        world.fill(groups, batch=1).run(1)
    assert world.story() == []
    world.fill(4, batch=1).run()  # 6 are left: 1 s to sleep, 1 s margin, 4 s loading and training
    assert world.story() == ["22 t0 is switching", "22 a sleep 0"]
    world.run(1)
    assert world.watch.nodes["t0"].claimable
    world.check_replay()


def test_how_long_a_trainer_computes_is_measured_once_a_batch_however_many_nodes_it_has() -> None:
    world = World(homes={"a": "t0", "b": "t1"}).add("r", "a", "b")
    for busy_s, expected in ((4.0, 4.0), (0.0, 4.0), (14.0, 7.0)):  # 4 + 0.3 * 10
        world.claim("t0", "t1").run(2).release("t0", "t1", busy_s=busy_s).run(2)
        world.release("t0", "t1", busy_s=busy_s)  # the response was lost
        assert world._program.lending._batches.train_s(MODEL) == expected


def test_a_node_is_claimable_that_is_not_lent_because_the_wait_is_short() -> None:
    world = lent().claim("t0").run(2)
    world.fill(5, batch=1).run(1).fill(6, batch=1).release("t0", busy_s=4.0)  # 4 s are left, 5 are the least
    node = world.watch.nodes["t0"]
    assert (node.role, node.claimable) == ("idle", True)
    world.story()
    world.run(1).fill(7, batch=1).run(1).fill(7, batch=1)
    assert world.story() == []  # it is reported once
    for _ in range(20):
        world.run(1).fill(7, batch=1)
    assert (node.role, node.claimable) == ("rollout", False)
    world.check_replay()


@pytest.mark.parametrize("why", ["no engine", "not for rollout", "lending is off"])
def test_a_node_that_is_never_lent_is_claimable_whenever_its_trainer_waits(why: str) -> None:
    world = World(homes={"a": "t0"}, lending={"enabled": why != "lending is off"}).add("r").run(4)
    if why == "not for rollout":
        world._runtime.inject(world._program.lending.added, NodeAdded("t0", ("train",)))
    if why != "no engine":
        world.add("a").run(1)
    world.fill(0)
    node = world.watch.nodes["t0"]
    for _ in range(2):
        assert not node.claimable
        world.release("t0").run(1)
        assert (node.role, node.claimable) == ("idle", True)
        world.claim("t0").run(2)
        assert (node.role, node.claimable) == ("train", False)


def test_the_only_engines_are_lent_however_short_the_wait_is() -> None:
    world = World(homes=T0).add("a", "b").fill(0).run(1).fill(8).claim("t0").run(1).release("t0", busy_s=99.0)
    assert world.run(6).watch.nodes["t0"].role == "rollout"  # at that pace the last two would be there


def test_a_batch_that_seemed_near_and_is_not_gets_its_node_again() -> None:
    world = lent()
    for groups in range(10):
        world.fill(groups, batch=1).run(1)
    assert world.watch.nodes["t0"].role == "idle"
    for _ in range(40):
        world.fill(9, batch=1).run(1)
    assert world.watch.nodes["t0"].role == "rollout"


def test_the_only_engines_are_not_recalled_before_the_claim() -> None:
    world = World(homes=T0).add("a", "b").release("t0").fill(0).run(6)
    for groups in range(1, 11):
        world.fill(groups).run(1)
    assert world.watch.nodes["t0"].role == "rollout"
    world.claim("t0").run(2)
    assert world.watch.nodes["t0"].role == "train"


def test_a_switch_that_takes_longer_than_the_wait_is_not_made_again() -> None:
    def outcome(do: StepCommand) -> Outcome:
        return Outcome(after_s=4 if do.step in ("wake", "sleep") else 1)

    world = lent(outcome=outcome)
    for groups in range(6):
        world.fill(groups, batch=1).run(1)
    world.claim("t0").run(6)  # putting to sleep took 4 s: measured
    world.release("t0").fill(0, batch=7).run(10)
    assert world.watch.nodes["t0"].role == "rollout"  # waking was never measured
    world.claim("t0").run(6).story()
    world.fill(0, batch=2).release(
        "t0"
    )  # waking took 7 s with its probe, so 12 s are the least; 10 s are left, or fewer
    for groups in range(1, 6):
        world.run(1).fill(groups, batch=2)
    assert world.story() == ["38 t0 is idle"]


def test_without_calls_nothing_is_lent() -> None:
    world = World(homes={"a": "t0"}).add("r", "a").run(4).release("t0")
    for _ in range(20):
        world.fill(0, running=1).run(1)
    assert world.watch.nodes["t0"].role == "idle"
    world.fill(0, running=2).run(6)
    assert world.watch.nodes["t0"].role == "rollout"


def test_lending_that_is_turned_off_wakes_nothing() -> None:
    world = World(homes={"a": "t0"}, lending={"enabled": False}).add("r", "a").release("t0")
    for _ in range(20):
        world.fill(0).run(1)
    assert world.watch.engines["a"].process == "none"


def test_a_silent_trainer_loses_its_node() -> None:
    world = lent().claim("t0").run(49).claim("t0").run(49)
    assert world.watch.nodes["t0"].role == "train"
    world.watch.released("t0")  # the watch knows of no silence
    world.run(10)
    assert world.watch.nodes["t0"].role == "rollout"


@pytest.mark.parametrize("order", ["rolling", "pull"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_response_at_its_deadline_counts(order: str, count: int) -> None:
    """The property found it with `pull`: placement ran before the result, which came at a later tag than its deadline."""
    fleet = {"max_restarts": 1, "backoff_s": 1}
    world = World(
        lambda do: Outcome(after_s=8 if do.step == "launch" else 1), fleet=fleet, update={"order": order}
    )
    world.add(*"ab"[:count]).run(50)
    assert [line for line in world.story() if "launch" in line] == [
        f"0 {name} launch 0" for name in "ab"[:count]
    ]


@pytest.mark.parametrize("order", ["rolling", "pull"])
@pytest.mark.parametrize("warm", [True, False])
def test_a_restart_for_an_engine_that_does_not_wake_counts(order: str, warm: bool) -> None:
    world = lent(fleet={"max_restarts": 1}, update={"order": order})
    world.outcome = lambda do: Outcome(ok=warm or do.step != "sleep")
    world.claim("t0").run(5).story()
    world.outcome = lambda do: Outcome(ok=do.step not in ("wake", "launch"))
    assert [line for line in world.release("t0").run(10).story() if " a " in line] == [
        f"15 a {'wake' if warm else 'launch'} 0",
        "16 a stop 0",
        "17 a launch 0",
        "18 a quarantine 0",
    ]


HOMES = st.sampled_from(
    [{}, {"a": "t0"}, {"a": "t0", "b": "t0"}, {"a": "t0", "b": "t1"}, {"a": "t0", "b": "t0", "c": "t0"}]
)
NODE = st.sampled_from(["t0", "t0", "t1"])
HAPPENS = st.one_of(
    st.tuples(st.just("run"), st.integers(0, 12)),
    st.tuples(st.just("run"), st.integers(0, 12)),
    st.tuples(st.just("claim"), NODE),
    st.tuples(st.just("release"), st.tuples(NODE, st.sampled_from([0.0, 0.0, 2.5, 40.0]))),
    st.tuples(st.just("fill"), st.tuples(*map(st.integers, (0, 0, 0, 0), (10, 9, 3, 4)))),
    st.tuples(
        st.sampled_from(["add", "remove", "lose", "pause", "resume"]), st.sampled_from(["a", "b", "c"])
    ),
    st.tuples(st.just("publish"), st.sampled_from([1, 1, 0])),
    st.tuples(st.just("repeat_results"), st.none()),
)


def happen(world: World, what: str, about: Any) -> None:
    """One event; an impossible one is left out."""
    match what:
        case "publish":
            world.publish(max(1, max(world.watch.published, default=0) + about))
        case "repeat_results":
            world.repeat_results()
        case "release" if about[0] in world.watch.nodes:
            world.release(about[0], busy_s=about[1])
        case "fill":
            groups, running, batch, ahead = about
            world.fill(groups, running, batch, ahead=ahead)
        case "claim" | "release" if about not in world.watch.nodes:
            return
        case _:
            getattr(world, what)(about)


@settings(deadline=None, max_examples=25)
@given(
    SETTINGS,
    HOMES,
    st.booleans(),
    st.integers(0, 3),
    OUTCOMES,
    st.sampled_from([0, 0, 1, 3]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.lists(HAPPENS, max_size=30),
)
def test_whatever_happens(
    chosen: tuple[dict[str, Any], dict[str, Any]],
    homes: dict[str, str],
    ends_first: bool,
    count: int,
    outcomes: dict[Step, list[Outcome]],
    slow: int,
    recall_ahead_share: float,
    events: list[tuple[str, Any]],
) -> None:
    """Claims are served, nothing wakes while it is claimed, updates end; in the end every engine runs the newest version."""
    drawn = {step: iter(those) for step, those in outcomes.items()}

    def outcome(do: StepCommand) -> Outcome:
        named = do.step in ("sleep", "wake") and slow
        return next(drawn.get(do.step, iter(())), Outcome(after_s=slow if named else 1))

    lending = {
        "min_stay_s": 0,
        "claim_s": 100_000,
        "deadline_s": 11,
        "recall_ahead_share": recall_ahead_share,
    }
    world = World(outcome, *chosen, lending=lending, homes=homes, ends_first=ends_first)
    world.add(*["a", "b", "c"][:count])
    for what, about in events:
        happen(world, what, about)
    converge(world)
    world.check_replay()


def converge(world: World) -> None:
    """Every trainer waits, no engine is paused, and there is work: every engine wakes, and loads a last version."""
    world.outcome = lambda do: Outcome()
    for engine in list(world.watch.engines):
        world.resume(engine)
    world.release(*world.watch.nodes)
    for _ in range(40):
        world.fill(0, running=99, batch=9).run(10)
    assert [ended.version for ended in world.watch.ends] == world.watch.published
    last = max(world.watch.published, default=0) + 1
    world.publish(last).run(100)
    assert world.watch.ends[-1].version == last
    assert all(engine.runs == last for engine in world.watch.engines.values())

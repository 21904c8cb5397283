"""Placement where several processes place calls by the same snapshots: what the others have, and what the coordinator decided."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.program.calls import (
    Arrived,
    Demand,
    EngineLoad,
    Opened,
    PeerLoad,
    PeerQueued,
    PeerRunning,
    Plan,
    Snapshot,
)
from scheduler.program.following import FollowerProgram
from scheduler.program.placement import PlacementSettings
from scheduler.reactor import Runtime, VirtualClock
from tests.unit.scheduler.program.field import ENGINE, HAPPENS, Field, calls, happen


def others(field: Field, processes: int, *given: PeerQueued | PeerRunning) -> Field:
    queued = tuple(one for one in given if isinstance(one, PeerQueued))
    held = tuple(one for one in given if isinstance(one, PeerRunning))
    field.inject(field.reactor.peer_load, PeerLoad(processes, queued, held))
    return field


def test_calls_of_an_older_v_that_wait_in_other_processes_go_first() -> None:
    """The engine has room for three: two of theirs, and one of ours."""
    field = others(Field().opens(one=1), 2, PeerQueued(0, 2, 10)).second(EngineLoad("one", 0, 0, 0, 0.0))
    field.arrive(*calls("a", "b", version=1))
    assert field.placed == {"a": "one"}
    others(field, 2).second(EngineLoad("one", 3, 0, 30, 1.0))
    assert field.placed == {"a": "one"}, "theirs are inside now"
    others(field, 2).second(EngineLoad("one", 1, 0, 10, 1.0))
    assert field.placed == {"a": "one", "b": "one"}


def test_calls_of_the_same_or_a_newer_v_that_wait_elsewhere_keep_no_call_from_an_engine() -> None:
    field = others(Field().opens(one=1), 2, PeerQueued(1, 9, 10)).second(EngineLoad("one", 0, 0, 0, 0.0))
    field.arrive(*calls("a", "b", "c", version=0))
    assert list(field.placed) == ["a", "b", "c"]


def test_an_engine_pulls_for_a_call_that_waits_in_another_process() -> None:
    """One engine has the newest weights and is full; the other has room, and is too old for the call."""
    field = Field(order="pull").publish(1).opens(new=1, old=0)
    field.arrive(*calls("a", "b", "c", preferred="new"), *calls("d", "e", preferred="old"))
    full = EngineLoad("new", 3, 0, 30, 1.0), EngineLoad("old", 2, 0, 20, 1.0)
    others(field, 2, PeerQueued(0, 1, 10)).second(*full)
    assert field.pulled == [], "the call can have the other as it is"
    others(field, 2, PeerQueued(1, 1, 10)).second(*full)
    assert field.pulled == ["old"]


def test_what_is_placed_between_two_snapshots_counts_for_processes_that_do_the_same() -> None:
    """One of two processes, each with as many calls: three more would fit into `one` before it is as full as `two`."""
    field = Field(choice={"rule": "cached"}).opens(one=0, two=0).arrive(*calls("a", "b"))
    others(field, 2).second(EngineLoad("one", 2, 0, 20, 1.0), EngineLoad("two", 5, 0, 50, 1.0))
    field.arrive(*calls("c", "d", "e"))
    assert [field.placed[name] for name in "cde"] == ["one", "one", "two"]
    field.leave("e")
    others(field, 1).second(EngineLoad("one", 3, 0, 20, 1.0), EngineLoad("two", 5, 0, 50, 1.0))
    field.arrive(*calls("f", "g"))
    assert [field.placed[name] for name in "fg"] == ["one", "one"], "it is alone"


def test_a_process_with_nearly_all_calls_takes_no_other_for_its_like() -> None:
    field = Field(choice={"rule": "cached"}).opens(one=0, two=0).arrive(*calls(*"abcdef"))
    others(field, 4).second(EngineLoad("one", 3, 0, 30, 1.0), EngineLoad("two", 4, 0, 40, 1.0))
    assert field.reactor._engines.times == 1
    field.arrive(*calls("g", "h"))
    assert [field.placed[name] for name in "gh"] == ["one", "one"]


def test_late_calls_of_other_processes_keep_an_engine_for_themselves() -> None:
    field = Field(choice={"late_call_weight": 8.0, "min_gain_share": 0.0}).opens(one=1, two=1).publish(1)
    others(field, 2, PeerRunning("one", 0, 1), PeerRunning("two", 1, 1))
    field.second(EngineLoad("one", 1, 0, 10, 1.0), EngineLoad("two", 1, 0, 10, 1.0))
    field.arrive(*calls("young", version=1))
    assert field.placed == {"young": "two"}


def test_a_process_moves_its_share_of_the_calls_that_wait_in_an_engine() -> None:
    """Of six, four wait: half of these are another process's to move."""
    field = Field(migration={"waiting_above": 0}).opens(one=0).arrive(*calls(*"abc")).opens(two=0)
    others(field, 2).second(EngineLoad("one", 2, 4, 60, 1.0))
    assert [(move.engine, move.target) for move in field.moves] == [("one", "two")] * 2


def test_a_process_moves_its_share_of_the_calls_that_may_move_at_once() -> None:
    field = Field(choice={"min_gain_share": 0.0}, migration={"waiting_above": 0, "per_engine": 2}).opens(
        one=0
    )
    field.arrive(*calls(*"abcdefgh")).opens(two=0)
    others(field, 2).second(EngineLoad("one", 1, 15, 160, 1.0))
    assert len(field.moves) == 2


def test_ends_of_calls_never_take_more_from_an_engine_than_others_have_there() -> None:
    """`two` has calls of this process alone; when one ends, no other process's end is to be expected there."""
    field = Field(choice={"rule": "cached"}).opens(one=0, two=0).arrive(*calls("a", "b"))
    others(field, 3).second(EngineLoad("one", 9, 0, 90, 1.0), EngineLoad("two", 1, 0, 10, 1.0))
    assert field.reactor._engines.times == 3
    field.arrive(*calls("c", preferred="two")).leave("b")
    found = {name: (engine.running, engine.foreign) for name, engine in field.reactor._engines.open.items()}
    assert found == {"one": (9, 8), "two": (1, 0)}
    field.leave("c")
    assert field.reactor._engines.open["two"].running == 0


class Follower:
    """The program of a process that follows."""

    def __init__(self, **given: object) -> None:
        values = {
            "choice": {"rule": "gain", "min_gain_share": 0.3, "late_call_weight": 1.0},
            "pull": True,
            "engine": ENGINE,
            **given,
        }
        self.program = FollowerProgram(PlacementSettings.of(values))
        self.reactor = self.program.placement
        self.runtime = Runtime(self.program, VirtualClock())
        self.placed: dict[str, str] = {}
        self.moved: list[str] = []
        self.pulled: list[str] = []
        observe = self.runtime.observe
        observe(self.reactor.placed, lambda _, placed: self.placed.update((p.call, p.engine) for p in placed))
        observe(self.reactor.moves, lambda _, moves: self.moved.extend(move.call for move in moves))
        observe(self.reactor.pull, lambda _, names: self.pulled.extend(names))
        self.runtime.start()

    def inject(self, action: object, value: object) -> None:
        self.runtime.inject(action, value)  # type: ignore[arg-type]
        self.runtime.advance()

    def opens(self, **versions: int) -> Follower:
        for name, version in versions.items():
            self.inject(self.reactor.opened, Opened(name, version))
        return self

    def arrive(self, *arrived: Arrived) -> Follower:
        self.inject(self.reactor.demand, Demand((), arrived))
        return self

    def second(self, plan: Plan, *seen: EngineLoad) -> Follower:
        self.inject(self.reactor.plan, plan)
        self.inject(self.reactor.peer_load, PeerLoad(2))
        self.inject(self.reactor.snapshot, Snapshot(seen))
        return self


def test_a_follower_leaves_alone_what_was_ordered_to_pull_and_orders_nothing() -> None:
    """Calls wait in `one`; `two` and `three` have room."""
    follower = Follower(migration={"waiting_above": 0}).opens(one=0).arrive(*calls(*"abc"))
    follower.opens(two=0, three=0)
    crowded = EngineLoad("one", 1, 2, 30, 1.0)
    follower.second(Plan(1, pulling=("two",)), crowded)
    assert follower.moved == [], "not at the moment at which an engine is ordered to pull"
    follower.second(Plan(1, pulling=("two", "three")), crowded)
    assert follower.moved == []
    follower.second(Plan(1, pulling=("two", "three")), crowded)
    assert follower.moved == [], "no other engine has room"
    follower.second(Plan(1, pulling=("three",)), crowded)
    assert (sorted(follower.moved), follower.pulled) == (["b", "c"], [])


def test_the_newest_version_is_the_coordinators_also_if_it_is_withdrawn() -> None:
    follower = (
        Follower(choice={"rule": "gain", "min_gain_share": 0.3, "late_call_weight": 8.0})
        .opens(one=3)
        .second(Plan(3))
    )
    assert follower.reactor._engines.weight(2) == 8.0
    follower.second(Plan(2))
    assert follower.reactor._engines.weight(2) == 1.0


def test_the_plan_for_followers_is_what_was_decided() -> None:
    field = Field(order="pull").opens(one=0, two=0).publish(1)
    assert field.reactor.decided() == Plan(1, pulling=tuple(field.pulled))
    field.closes(*field.pulled)
    assert field.reactor.decided() == Plan(1)


OTHERS = st.builds(
    PeerLoad,
    st.integers(1, 4),
    st.lists(st.builds(PeerQueued, st.integers(0, 3), st.integers(1, 5), st.just(10)), max_size=3).map(tuple),
    st.lists(
        st.builds(PeerRunning, st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 4)), max_size=4
    ).map(tuple),
)


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(["cached", "gain"]),
    st.sampled_from(["rolling", "pull"]),
    st.sampled_from([1.0, 16.0]),
    st.lists(st.one_of(HAPPENS, OTHERS), max_size=40),
)
def test_whatever_other_processes_have_every_call_is_placed_once_and_none_waits_for_ever(
    rule: str, order: str, late_call_weight: float, events: list[tuple[str, str, int] | PeerLoad]
) -> None:
    """`Field._on_placed` looks at every placement. In the end the other processes have nothing, as every snapshot shows."""
    field = Field(order, choice={"rule": rule, "late_call_weight": late_call_weight})
    for event in events:
        if isinstance(event, PeerLoad):
            field.inject(field.reactor.peer_load, event)
        else:
            happen(field, *event)
        assert field.reactor.waiting == len(field.wanted), "a call was lost, or is there twice"
        for engine in field.reactor._engines.open.values():
            own = engine.running - engine.foreign
            assert own == sum(engine.calls_by_version.values())
            assert engine.foreign >= 0 and engine.kv >= engine.floor
    field.opens(a=3, b=3)
    idle = EngineLoad("a", 0, 0, 0, 0.0), EngineLoad("b", 0, 0, 0, 0.0)
    others(field, 2).second(*idle)
    while field.wanted:
        before = len(field.wanted)
        field.leave(*field.placed)
        others(field, 2).second(*idle)
        assert len(field.wanted) < before, "a call waits although every engine is empty"

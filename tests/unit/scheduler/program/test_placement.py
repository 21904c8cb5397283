"""The reactor of placement in the control program: events in virtual time, and the decisions about them."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.throughput import EngineModel
from scheduler.program import ControlProgram
from scheduler.program.calls import CallDeparted, Demand, EngineLoad, Opened, Snapshot, SpeedFitted
from scheduler.program.events import Added
from scheduler.reactor import Recording, Runtime, VirtualClock, replay
from tests.unit.scheduler.program.field import ENGINE, HAPPENS, MODEL, Field, calls, happen


def test_calls_wait_until_an_engine_opens_and_then_in_their_order() -> None:
    field = Field().arrive(*calls(*"abcd"))
    assert not field.placed
    field.opens(one=0)
    assert list(field.placed) == list("abc")
    assert field.reactor.waiting == 1
    field.leave("b")
    assert field.placed["d"] == "one"


def test_ends_and_arrivals_of_one_turn_are_taken_in_that_order() -> None:
    field = Field().opens(one=0).arrive(*calls(*"abc"))
    field.wanted["a"] = calls("a")[0]
    field.placed.pop("a")
    field.inject(field.reactor.demand, Demand((CallDeparted("a", 20),), tuple(calls("a"))))
    assert field.placed == {"b": "one", "c": "one", "a": "one"}


def test_fitted_coefficients_are_kept_while_an_engine_is_closed() -> None:
    field = Field().opens(one=0)
    field.inject(field.reactor.fitted, SpeedFitted("one", EngineModel(0.0, 1.0, 2.0, 0.0)))
    field.closes("one").opens(one=0).arrive(*calls(*"ab"))
    assert list(field.placed) == ["a"]  # a second call would add nothing


def test_without_pull_no_engine_is_ordered_to() -> None:
    field = Field(order="rolling").opens(one=0, two=0).publish(1).second()
    assert field.pulled == []


def test_a_version_is_pulled_at_once_by_one_and_by_the_others_when_they_are_under_used() -> None:
    field = Field(order="pull").opens(e1=0, e2=0, e3=0)
    field.arrive(*calls(*"abcdef")).leave("c")  # two calls in e1 and in e2, one in e3
    assert sorted(field.placed.values()).count("e3") == 1
    field.publish(1)
    assert field.pulled == ["e3"]
    field.second()
    assert field.pulled == ["e3"]
    field.closes("e3").opens(e3=1).second()
    assert field.pulled == ["e3"]
    field.leave(*(name for name, engine in field.placed.items() if engine == "e2"))
    field.second()
    assert field.pulled == ["e3", "e2"]


def test_an_engine_that_loads_an_adapter_while_it_samples_pulls_however_busy_it_is() -> None:
    field = Field(order="pull", mode="adapter").opens(e1=0, e2=0).arrive(*calls(*"abcdef"))
    field.publish(1)
    assert field.pulled == ["e1"]
    field.opens(e1=1).second()
    assert field.pulled == ["e1", "e2"]


def test_a_call_that_no_open_engine_may_sample_makes_one_pull_at_once() -> None:
    field = Field(order="pull").opens(one=0, two=0).arrive(*calls(*"abcdef"))
    field.publish(1)
    first = field.pulled[0]
    field.inject(
        field.program.fleets[MODEL].added, Added(first)
    )  # the fleet reports that it is unavailable for now
    field.closes(first).arrive(*calls("new", version=1))
    assert sorted(field.pulled) == ["one", "two"]
    assert "new" not in field.placed
    second = field.pulled[1]
    field.closes(second).opens(**{second: 1})
    field.leave(*[name for name, engine in field.placed.items() if engine == second][:1])
    assert field.placed["new"] == second


def test_an_order_to_pull_is_repeated_for_an_engine_that_stays_open() -> None:
    field = Field(order="pull").opens(one=0).publish(1)
    for _ in range(4):
        field.second()
    assert field.pulled == ["one"]
    field.second().second()
    assert field.pulled == ["one", "one"]


def test_calls_move_out_of_a_queue_and_none_while_an_engine_pulls() -> None:
    for order, version in (("rolling", 0), ("pull", 1)):
        field = Field(order=order, migration={"waiting_above": 0}).opens(one=0).arrive(*calls(*"abc"))
        field.opens(two=0)
        if version:
            field.publish(1)
            assert field.pulled == ["two"]
        field.pulled.clear()
        field.second(EngineLoad("one", 1, 2, 30, 1.0))
        if version:  # no engine pulls now, and only one is left that does not
            assert field.moves == []
        else:
            assert [(move.engine, move.target) for move in field.moves] == [("one", "two")] * 2
            field.second(EngineLoad("one", 1, 2, 30, 1.0))
            assert len(field.moves) == 3  # no order is repeated


def test_nothing_moves_at_the_moment_at_which_an_engine_is_ordered_to_pull() -> None:
    """Calls wait in `one`, and `two` has room for them; at the same snapshot `three` is ordered to pull."""
    field = Field(order="pull", migration={"waiting_above": 0}).publish(1)
    field.opens(one=1).arrive(*calls(*"abc", version=1)).opens(two=1, three=0)
    field.second(EngineLoad("one", 1, 2, 30, 1.0))
    assert (field.pulled, field.moves) == (["three"], [])
    field.second(EngineLoad("one", 1, 2, 30, 1.0))
    assert (field.pulled, len(field.moves)) == (["three"], 2)


def test_a_late_call_moves_with_the_tokens_that_it_has_by_now() -> None:
    """Two calls of V = 0 as long as one another when they came; one of them has been there longer."""
    engine = {"s_per_kv_token": 1e-3, "s_per_batch": 0.1, "s_per_call": 1e-3, "s_per_step": 0.1}
    field = Field(choice={"late_call_weight": 8.0, "min_gain_share": 0.0}, engine=engine).opens(one=0)
    field.arrive(*calls("old")).second(EngineLoad("one", 1, 0, 510, 500.0))
    field.arrive(*calls("new")).second(EngineLoad("one", 2, 0, 560, 80.0))
    assert field.placed == {"old": "one", "new": "one"}
    field.opens(two=0).publish(1).second(EngineLoad("one", 2, 0, 640, 80.0))
    assert [(move.call, move.target) for move in field.moves] == [("old", "two")]


def test_a_pinned_call_never_moves() -> None:
    field = Field(migration={"waiting_above": 0}).opens(one=0)
    field.arrive(*calls(*"abc", pinned=True)).opens(two=0).second(EngineLoad("one", 1, 2, 30, 1.0))
    assert field.moves == []


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(["cached", "gain"]),
    st.sampled_from(["rolling", "pull"]),
    st.sampled_from([1.0, 16.0]),
    st.lists(HAPPENS, max_size=40),
)
def test_whatever_happens_every_call_is_placed_once_and_on_no_engine_below_its_v(
    rule: str, order: str, late_call_weight: float, events: list[tuple[str, str, int]]
) -> None:
    """`Field._on_placed` looks at every placement. In the end engines open, what runs leaves, and no call waits for ever."""
    field = Field(order, choice={"rule": rule, "late_call_weight": late_call_weight})
    for event in events:
        happen(field, *event)
        known = field.reactor.waiting
        assert known == len(field.wanted), "a call was lost, or is there twice"
    field.opens(a=3, b=3).second()
    while field.wanted:
        before = len(field.wanted)
        field.leave(*field.placed).second()
        assert len(field.wanted) < before, "a call waits although every engine is empty"


@settings(deadline=None, max_examples=40)
@given(st.lists(HAPPENS, max_size=30), st.integers(1, 3))
def test_while_a_call_waits_that_is_too_new_for_all_an_engine_is_ordered_to_pull(
    events: list[tuple[str, str, int]], version: int
) -> None:
    """Whatever went before: the engines that are ordered to pull come back with the newest version, and then it is placed."""
    field = Field("pull")
    for event in events:
        happen(field, *event)
    field.leave(*field.placed, *field.wanted)
    field.publish(3).opens(a=0, b=0, c=0)  # who was on its way has ended it
    field.arrive(*calls("young", version=version))
    field.pulled.clear()
    for _ in range(8):
        if "young" in field.placed:
            return
        field.second()
        for name in set(field.pulled):
            field.closes(name).opens(**{name: 3})
        field.pulled.clear()
    raise AssertionError("it waits for ever")


def test_the_engine_that_admits_a_group_is_the_one_that_would_get_its_call() -> None:
    field = Field().opens(new=2, old=1).arrive(*calls("a", "b", version=2))
    assert (field.reactor.admitting(1), field.reactor.admitting(2)) == (1, 2)
    assert field.reactor.admitting(3) is None
    field.arrive(*calls("c", "d", "e", preferred="old"), *calls("f", version=2))
    assert field.reactor.admitting(1) is None, "no engine has room"
    before = dict(field.placed)
    field.leave("c")
    assert field.reactor.admitting(1) == 1
    assert field.placed == {name: engine for name, engine in before.items() if name != "c"}


def test_engines_of_another_zone_are_far_for_a_process_with_a_zone() -> None:
    for zone, expected in (("a", ["z", "z", "b"]), ("", ["b", "z", "b"])):
        field = Field(zone=zone, distance_s=64.0)
        for name, where in (("b", "b"), ("z", "a")):
            field.open[name] = 0
            field.inject(field.reactor.opened, Opened(name, 0, where))
        field.arrive(*calls("c", "d", "e"))
        assert [field.placed[name] for name in "cde"] == expected


def test_the_run_of_a_placement_replays() -> None:
    class Kept(io.BytesIO):
        def close(self) -> None:
            """Does nothing: the file is read afterwards."""

    given = {"models": {MODEL: {"placement": {"choice": {"rule": "gain"}, "engine": ENGINE}}}}
    program, file = ControlProgram(given), Kept()
    recording = Recording(file, given)
    runtime = Runtime(program, VirtualClock(), recording)
    runtime.start()
    reactor = program.placements[MODEL]
    runtime.inject(reactor.opened, Opened("one", 0))
    runtime.inject(reactor.demand, Demand((), tuple(calls(*"abcd", cached_in="one", cached=3))))
    runtime.inject(reactor.snapshot, Snapshot((EngineLoad("one", 3, 1, 30, 1.5),)))
    runtime.inject(reactor.demand, Demand((CallDeparted("a", 20),)))
    runtime.advance()
    recording.close()
    report = replay(file.getvalue().decode().splitlines(), ControlProgram)
    assert report.difference is None

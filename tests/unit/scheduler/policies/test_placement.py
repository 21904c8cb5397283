"""The waterfall, worked out by hand.

With s_per_batch = s_per_step = 1 s and s_per_call = 0.5 s an engine samples 0.5, 1, 1.2, 1.33, 1.43 tokens a second with 1 to 5
calls: each adds 0.5, 0.5, 0.2, 0.133, 0.095. The ideal gain is 0.5, so with min_gain_share = 0.3 an engine has room for three
calls.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.cached import EngineLoad, choose
from scheduler.policies.open_engines import Engines
from scheduler.policies.placement import Choice
from scheduler.policies.throughput import EngineModel
from scheduler.policies.waterfall import Waterfall
from scheduler.program.calls import Arrived
from tests.unit.scheduler.policies.placements import GAIN, MODEL, calls, poured


def waterfall(choice: Choice = GAIN, **versions: int) -> Waterfall:
    engines = Engines(choice)
    for name, version in versions.items():
        engines.opened(name, version, MODEL)
    return Waterfall(engines)


def test_each_call_goes_where_it_adds_most_and_what_finds_no_room_waits() -> None:
    fall = waterfall(a=0, b=0)
    placed = poured(fall, *calls(8))
    assert list(placed.values()) == ["a", "b", "a", "b", "a", "b"]
    assert list(fall.waiting) == ["v0-6", "v0-7"]


def test_a_call_that_leaves_makes_room_for_the_first_that_waits() -> None:
    fall = waterfall(a=0)
    poured(fall, *calls(5))
    fall.engines.remove_call("a", 0, 10, 50)
    assert poured(fall) == {"v0-3": "a"}


def test_the_oldest_version_comes_first_in_whatever_order_calls_arrive() -> None:
    fall = waterfall(a=2)
    placed = poured(fall, *calls(2, version=2), *calls(2, version=1))
    assert list(placed) == ["v1-0", "v1-1", "v2-0"]


def test_no_call_goes_to_an_engine_older_than_its_v() -> None:
    fall = waterfall(old=1, new=2)
    placed = poured(fall, *calls(5, version=2), *calls(3, version=1))
    assert {call: engine for call, engine in placed.items() if call.startswith("v2")} == {
        "v2-0": "new",
        "v2-1": "new",
    }  # one place of `new` was taken by a call that may go anywhere
    assert sorted(placed[f"v1-{i}"] for i in range(3)) == ["new", "old", "old"]
    assert set(fall.waiting) == {"v2-2", "v2-3", "v2-4"}


def test_a_call_that_must_be_trained_sooner_is_not_overtaken() -> None:
    """A long call of V = 1 has no room; short ones of V = 2 would, and wait behind it."""
    engines = Engines(GAIN)
    engines.opened("a", 2, EngineModel(s_per_kv_token=0.01, s_per_batch=1.0, s_per_call=0.5, s_per_step=1.0))
    fall = Waterfall(engines)
    poured(fall, *calls(2, version=2))
    placed = poured(fall, Arrived("long", 1, 10_000), *[Arrived("short", 2, 10)])
    assert placed == {}
    engines.remove_call("a", 0, 10, 10)
    engines.remove_call("a", 0, 10, 10)
    assert next(iter(poured(fall))) == "long"


def test_an_engine_in_whose_queue_calls_wait_has_no_room() -> None:
    fall = waterfall(a=0, b=0)
    fall.engines.apply_snapshot("a", 0, 1, 0)
    fall.engines.refile()
    assert set(poured(fall, *calls(4)).values()) == {"b"}


def test_what_was_placed_counts_whatever_a_late_snapshot_shows() -> None:
    fall = waterfall(a=0)
    poured(fall, *calls(3))
    fall.engines.apply_snapshot("a", 0, 0, 0)
    fall.engines.refile()
    engine = fall.engines.open["a"]
    assert (engine.running, engine.foreign, engine.kv) == (3, 0, 30)
    assert poured(fall, Arrived("late", 0, 10)) == {}


def test_a_call_fills_the_cache_until_it_leaves() -> None:
    engines = waterfall(a=0).engines
    engines.add_call("a", 0, 10)
    engines.add_call("a", 0, 20)
    engines.apply_snapshot("a", 2, 0, 45)  # they have grown
    engines.remove_call("a", 0, 10, 25)
    assert (engines.open["a"].kv, engines.open["a"].running) == (20, 1)
    engines.add_call("a", 0, 7)
    assert engines.open["a"].kv == 27


def test_an_engine_is_judged_by_its_newest_measured_speed_also_when_it_opens_again() -> None:
    fall = waterfall(a=0, b=0)
    slow = EngineModel(s_per_kv_token=0.0, s_per_batch=9.0, s_per_call=0.0, s_per_step=9.0)
    fall.engines.fitted("a", slow)
    fall.engines.fitted("unknown", slow)
    assert poured(fall, *calls(1)) == {"v0-0": "b"}
    fall.engines.closed("a")
    fall.engines.opened("a", 0, MODEL)
    assert fall.engines.open["a"].model == slow


def test_calls_that_others_placed_count_by_the_snapshot() -> None:
    fall = waterfall(a=0, b=0)
    poured(fall, *calls(1))
    fall.engines.apply_snapshot("a", 3, 0, 40)
    fall.engines.refile()
    assert fall.engines.open["a"].foreign == 2
    fall.engines.remove_call("a", 0, 10, 10)
    assert fall.engines.open["a"].running == 2


def test_a_cached_prefix_counts_as_prefill_that_is_saved() -> None:
    fall = waterfall(a=0, b=0)
    poured(fall, *calls(1))
    assert fall.engines.open["a"].running == 1
    near = Arrived("near", 0, 2000, cached_in="a", cached=1900)
    assert poured(fall, near) == {"near": "a"}
    assert poured(fall, Arrived("far", 0, 2000)) == {"far": "b"}


@pytest.mark.parametrize(("running", "best"), [(1, "a"), (4, "b")])
def test_a_later_turn_leaves_its_cache_for_more_than_its_prefill_costs(running: int, best: str) -> None:
    """An empty engine adds 0.91 tokens a second, and a prefill costs 0.41 of them; `a` adds 0.69, or with four calls 0.36."""
    engines = Engines(Choice("gain"))
    for name, count in (("a", running), ("b", 0)):
        engines.opened(
            name,
            0,
            EngineModel(s_per_kv_token=1e-4 / 128, s_per_batch=0.0, s_per_call=1e-3, s_per_step=1.0),
            [(0, 128_000)] * count,
        )
    turn = Arrived("turn", 0, 128_000, cached_in="a", cached=115_200)
    assert engines.best(replace(turn, cached=0)) is engines.open["b"]
    engine = engines.best(turn)
    assert engine is engines.open[best]
    assert engines.best(replace(turn, avoid=("a",))) is engines.open["b"]
    assert engines.best(replace(turn, version=1)) is None
    engines.apply_snapshot("a", running, 1, 128_000 * running)
    assert engines.best(turn) is engines.open["b"], "calls wait in its queue"


@pytest.mark.parametrize("cached", [900, 1100, 1990])
def test_an_agent_that_fans_out_gets_every_engine(cached: int) -> None:
    """200 calls of one prompt that one of eight engines has: it gets more than the others, and none is idle."""
    fall = Waterfall(Engines(Choice("gain")))
    for name in "abcdefgh":
        fall.engines.opened(name, 0, EngineModel(4.5e-8, 6.07e-3, 2.57e-5, 3e-3))
    placed = poured(fall, *(Arrived(f"c{n}", 0, 2000, cached_in="a", cached=cached) for n in range(200)))
    running = [engine.running for engine in fall.engines.open.values()]
    assert len(placed) == 200
    assert min(running) >= 15 and max(running) == running[0] <= 100


def test_an_engine_that_a_call_was_sent_to_takes_it_in_any_case_but_the_version() -> None:
    fall = waterfall(a=0, b=1)
    poured(fall, *calls(6))
    assert poured(fall, Arrived("sent", 0, 10, preferred="a")) == {"sent": "a"}
    fall = waterfall(a=0, b=1)
    assert poured(fall, Arrived("sent", 0, 10, preferred="b")) == {"sent": "b"}
    assert poured(fall, Arrived("new", 1, 10, preferred="a")) == {"new": "b"}


def test_a_call_that_waits_already_is_refused() -> None:
    fall = waterfall()
    fall.add(Arrived("one", 0, 1))
    with pytest.raises(ValueError, match="waits already"):
        fall.add(Arrived("one", 0, 1))


NAMES = st.sampled_from([f"e{i:02d}" for i in range(20)])


@given(
    st.dictionaries(NAMES, st.integers(0, 30), min_size=1),
    NAMES,
    st.integers(0, 6000),
    st.sets(NAMES, max_size=3),
)
def test_the_rule_cached_chooses_as_the_plain_policy_does(
    running: dict[str, int], near: str, cached: int, avoid: set[str]
) -> None:
    """However the engines lie in their heaps: the plain policy looks at every one."""
    fall = waterfall(Choice("cached"))
    for name, count in running.items():
        fall.engines.opened(name, 0, MODEL, [(0, 1)] * count)
    loads = [EngineLoad(name, n, cached if name == near else 0) for name, n in running.items()]
    request = Arrived("call", 0, 6000, cached_in=near, cached=cached, avoid=tuple(sorted(avoid)))
    assert poured(fall, request)["call"] == choose(loads, frozenset(avoid))


def test_a_cached_prefix_does_not_lead_below_v() -> None:
    for rule in (GAIN, Choice("cached")):
        fall = waterfall(rule, old=0, new=1)
        assert poured(fall, Arrived("call", 1, 2000, cached_in="old", cached=1900)) == {"call": "new"}


def test_an_engine_with_a_queue_has_no_room_and_is_the_last() -> None:
    fall = waterfall(a=0, b=0)
    fall.engines.apply_snapshot("a", 1, 1, 0)
    fall.engines.refile()
    assert not GAIN.has_room(fall.engines.open["a"], 10)
    poured(fall, *calls(3))
    placed = poured(fall, Arrived("more", 0, 10))
    assert placed == {}
    low = Choice("gain", 0.0, 1.0)
    fall = waterfall(low, a=0, b=0)
    fall.engines.opened("b", 0, MODEL, [(0, 10)] * 5)
    fall.engines.apply_snapshot("a", 1, 1, 0)
    fall.engines.refile()
    assert poured(fall, Arrived("one", 0, 10)) == {"one": "b"}  # `a` would gain more, but for its queue


def test_a_call_leaves_its_zone_once_another_engine_gains_more_than_the_distance_costs() -> None:
    """A call gains 0.5 in an empty engine, of which 64 s of its 512 s there are lost by the distance: 0.4375; as the second of
    the near engine, it gains 0.5, as the third 0.2."""
    engines = Engines(GAIN)
    engines.opened("far", 0, MODEL, far_s=64.0)
    engines.opened("near", 0, MODEL)
    placed = poured(Waterfall(engines), *calls(4))
    assert list(placed.values()) == ["near", "near", "far", "far"]

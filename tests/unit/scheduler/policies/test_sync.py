"""Weight pulls and call migration, by hand-computed examples. The engine is that of `test_placement`."""

from __future__ import annotations

from scheduler.policies.migration import MigrationSettings, Movable, moves
from scheduler.policies.placement import Choice, EngineRequest, OpenEngine
from scheduler.policies.sync import SyncSettings, pulls
from scheduler.program.calls import Arrived
from tests.unit.scheduler.policies.placements import GAIN, MODEL


def engine(name: str, version: int, running: int, waiting: int = 0) -> OpenEngine:
    return OpenEngine(name, version, MODEL, running=running, kv=10 * running, waiting=waiting)


def pulled(
    engines: list[OpenEngine],
    *heads: EngineRequest,
    target: int = 2,
    under_way: int = 0,
    choice: Choice = GAIN,
    **given: float,
) -> list[str]:
    settings = SyncSettings(**{"at_once": 1.0, **given})  # type: ignore[arg-type]
    return pulls(engines, under_way, target, heads, choice, settings)


def test_the_engine_with_least_to_do_is_the_first_to_run_a_version() -> None:
    assert pulled([engine("a", 1, 5), engine("b", 1, 3), engine("c", 1, 4)]) == ["b"]


def test_no_engine_pulls_while_the_first_is_on_its_way_and_all_are_busy() -> None:
    assert pulled([engine("a", 1, 5), engine("c", 1, 4)], under_way=1) == []


def test_an_engine_with_few_calls_pulls_and_a_busy_one_goes_on() -> None:
    assert pulled([engine("new", 2, 3), engine("few", 1, 1), engine("busy", 1, 5)]) == ["few"]
    assert pulled([engine("new", 2, 3), engine("few", 1, 2)]) == []
    assert pulled([engine("new", 2, 3), engine("few", 1, 2)], running_below=3) == ["few"]


def test_an_engine_that_is_about_to_get_a_call_is_not_under_used() -> None:
    engines = [engine("new", 2, 3), engine("few", 1, 1)]
    assert pulled(engines, Arrived("old", 1, 10)) == []
    assert pulled(engines, Arrived("young", 2, 10)) == ["few"]


def test_an_engine_pulls_for_a_call_that_is_too_new_and_would_gain_enough_there() -> None:
    engines = [engine("new", 2, 5), engine("roomy", 1, 2), engine("full", 1, 3)]
    assert pulled(engines, Arrived("young", 2, 10)) == ["roomy"]
    assert pulled(engines) == []


def test_where_late_calls_count_more_an_engine_pulls_that_others_would_gain_in() -> None:
    """No call waits, yet one adds 0.095 in the newest engine and 0.2 in the other; among late calls it would lose."""
    urgent = Choice("gain", min_gain_share=0.3, late_call_weight=8.0)
    engines = [engine("new", 2, 4), engine("old", 1, 2)]
    assert pulled(engines) == []
    assert pulled(engines, choice=urgent) == ["old"]
    engines[1].extra = 14.0
    assert pulled(engines, choice=urgent) == []


def test_while_no_engine_may_sample_a_call_one_is_on_its_way_however_busy() -> None:
    engines = [engine("a", 1, 9), engine("b", 1, 8)]
    young = Arrived("young", 2, 10)
    assert pulled(engines, young) == ["b"]
    assert pulled(engines, young, under_way=1) == []


def test_only_a_share_is_on_its_way_concurrently_and_one_always_may_be() -> None:
    engines = [engine("new", 2, 3), *(engine(f"e{i}", 1, 0) for i in range(7))]
    assert len(pulled(engines, at_once=0.5)) == 4
    assert len(pulled(engines, at_once=0.0)) == 1
    assert len(pulled(engines, at_once=0.5, under_way=3)) == 2


def moved(
    engines: list[OpenEngine], inside: dict[str, list[Movable]], **given: object
) -> list[tuple[str, str, str]]:
    return moves(engines, lambda name: inside.get(name, []), GAIN, MigrationSettings(**given))  # type: ignore[arg-type]


def runs(count: int, version: int = 0, length: int = 10) -> list[Movable]:
    return [Movable(f"c{i}", version, length) for i in range(count)]


def test_calls_leave_a_long_queue_for_an_engine_with_room_the_last_and_shortest_first() -> None:
    engines = [engine("a", 0, 6, waiting=4), engine("b", 0, 1)]
    inside = {"a": [*runs(5), Movable("short", 0, 5)]}
    assert moved(engines, inside, waiting_above=2) == [("short", "a", "b"), ("c4", "a", "b")]
    assert moved(engines, inside, waiting_above=4, gap_above=10.0) == []


def test_no_more_move_than_there_is_room_for() -> None:
    engines = [engine("a", 0, 9, waiting=8), engine("b", 0, 2)]
    assert moved(engines, {"a": runs(9)}, waiting_above=0) == [("c8", "a", "b")]


def test_a_gap_is_closed_until_it_is_small_or_nothing_is_gained() -> None:
    engines = [engine("fast", 0, 8), engine("slow", 0, 0)]  # 1.6 tokens a second, and none
    planned = moved(engines, {"fast": runs(8)})
    assert [call for call, _, _ in planned] == ["c7", "c6", "c5"]  # 5 and 3: 1.43 and 1.2, below 1.2 times
    assert moved(engines, {"fast": runs(8)}, on=False) == []


def test_a_gap_below_the_trigger_moves_nothing() -> None:
    assert moved([engine("fast", 0, 4), engine("slow", 0, 2)], {"fast": runs(4)}) == []


def test_no_call_moves_to_an_engine_older_than_its_v() -> None:
    engines = [engine("fast", 2, 8), engine("slow", 1, 0)]
    assert moved(engines, {"fast": runs(8, version=2)}) == []
    crowded = [engine("a", 2, 8, waiting=5), engine("b", 1, 0)]
    assert moved(crowded, {"a": runs(8, version=2)}) == []


def test_an_engine_is_forced_though_another_runs_the_target() -> None:
    """The newest open engine is at the target; a call is newer still: its group began under what is about to come."""
    engines = [engine("new", 2, 9), engine("old", 1, 8)]
    assert pulled(engines, Arrived("younger", 3, 10)) == ["old"]
    assert pulled(engines, Arrived("as new", 2, 10)) == []
    assert pulled(engines) == []


def test_those_with_fewest_tokens_leave_first_whenever_they_came() -> None:
    engines = [engine("a", 0, 6, waiting=4), engine("b", 0, 1)]
    inside = {"a": [Movable("short", 0, 5), *runs(4)]}
    assert moved(engines, inside, waiting_above=3) == [("short", "a", "b")]

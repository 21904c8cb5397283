"""Calls that count more the later they are: where they go, what keeps out of their way, and that nothing else changes.

The engine is that of `test_placement` (s_per_batch = s_per_step = 1 s, s_per_call = 0.5 s: a step takes 2, 2, 2.5, 3, 3.5 s with
1 to 5 calls).
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import assume, given
from hypothesis import strategies as st

from scheduler.policies.migration import MigrationSettings, Movable, moves
from scheduler.policies.open_engines import Engines
from scheduler.policies.placement import Choice, OpenEngine
from scheduler.policies.throughput import EngineModel
from scheduler.policies.waterfall import Waterfall
from scheduler.program.calls import Arrived
from tests.unit.scheduler.policies.placements import MODEL, calls, poured

LATE = Choice("gain", min_gain_share=0.3, late_call_weight=8.0)
LONG = EngineModel(s_per_kv_token=1e-4, s_per_batch=0.1, s_per_call=1e-3, s_per_step=0.1)
"""Calls are felt by their length."""


def engines(choice: Choice, newest: int, **held: Sequence[int]) -> Engines:
    """Engines of the newest version, and the V of the calls in each."""
    found = Engines(choice)
    found.typical = 10.0
    found.published(newest)
    for name, versions in held.items():
        found.opened(name, newest, MODEL, [(version, 10) for version in versions])
    return found


def test_others_keep_out_of_the_engine_of_late_calls() -> None:
    """A third call lengthens the step of the two that are there by a quarter: it adds 0.2, or loses 1.2 where they are late."""
    for choice, best in ((Choice("gain", 0.3, 1.0), "a"), (LATE, "b")):
        held = engines(choice, 1, a=[0, 0], b=[1, 1])
        assert poured(Waterfall(held), *calls(1, version=1)) == {"v1-0": best}


def test_whether_a_call_waits_is_a_matter_of_tokens_and_a_late_one_waits_for_less() -> None:
    """A third call adds 0.2 tokens a second, more than 0.3 of 0.5; a fourth 0.13."""
    held = engines(LATE, 1, a=[0, 0], b=[0, 0])
    assert list(poured(Waterfall(held), *calls(3, version=1)).values()) == ["a", "b"]
    assert list(poured(Waterfall(held), *calls(3, version=0)).values()) == ["a", "b", "a"]


def test_a_late_call_gets_the_fastest_engine_however_many_are_better_for_others() -> None:
    """A late call counts 8: it adds 1.6 to `z` and 1.4 to a busy engine. Another call adds 0.04 there, and costs `z` 1.2."""
    choice = Choice("gain", min_gain_share=0.01, late_call_weight=8.0)
    held = engines(choice, 1, **{f"busy{i}": [1] * 7 for i in range(6)}, z=[0, 0])
    assert poured(Waterfall(held), *calls(1, version=1)) == {"v1-0": "busy0"}
    assert poured(Waterfall(held), *calls(1, version=0)) == {"v0-0": "z"}


def test_what_counts_changes_with_the_newest_version_and_with_what_is_there() -> None:
    held = engines(LATE, 0, a=[0, 0])
    assert held.open["a"].extra == 0
    held.published(1)
    assert held.open["a"].extra == 14
    held.published(3)
    held.published(2)  # a version that is behind is not the newest
    assert held.open["a"].extra == 2 * (8**3 - 1)
    held.add_call("a", 3, 10)
    held.remove_call("a", 0, 10, 10)
    assert (held.open["a"].running, held.open["a"].extra) == (2, 8**3 - 1)
    held.published(500)  # as of a frozen model, whose calls have V = 0
    assert held.open["a"].extra == 2 * (8**4 - 1)
    assert Choice("cached", late_call_weight=8.0).weight(3) == 1.0


NAMES = st.sampled_from([f"e{i:02d}" for i in range(12)])
INSIDE = st.dictionaries(NAMES, st.lists(st.integers(1, 3000), max_size=12), min_size=1)
"""Engines, and the lengths of the calls in each."""


@given(INSIDE, NAMES, st.integers(1, 6000), st.integers(0, 6000), st.integers(0, 1))
def test_if_all_calls_count_the_same_the_choice_is_that_without_weights(
    inside: dict[str, list[int]], near: str, length: int, cached: int, behind: int
) -> None:
    """No call is late, or all are equally late. `min_gain_share` is 0, as late calls wait for less. A power of two rounds
    nothing."""
    request = Arrived("call", 3 - behind, length, cached_in=near, cached=cached)
    found = []
    for late_call_weight in (1.0, 16.0):
        held = Engines(Choice("gain", min_gain_share=0.2 * (not behind), late_call_weight=late_call_weight))
        held.published(3)
        for name, lengths in inside.items():
            held.opened(name, 3, LONG, [(3 - behind, each) for each in lengths])
        best = held.best(request)
        found.append(best.name if best else None)
    assert found[0] == found[1]


EACH = st.tuples(st.integers(0, 3), st.integers(1, 3000))
"""V and length of a call."""


@given(
    st.dictionaries(NAMES, st.tuples(st.integers(0, 3), st.lists(EACH, max_size=10)), min_size=1, max_size=4),
    st.lists(EACH, max_size=12),
    st.sampled_from([1.0, 4.0, 64.0]),
)
def test_no_weight_leads_below_v_nor_past_a_call_that_is_due_sooner(
    held: dict[str, tuple[int, list[tuple[int, int]]]],
    requests: list[tuple[int, int]],
    late_call_weight: float,
) -> None:
    found = Engines(Choice("gain", min_gain_share=0.4, late_call_weight=late_call_weight))
    found.published(3)
    for name, (version, inside) in held.items():
        found.opened(name, version, LONG, inside)
    fall = Waterfall(found)
    waiting = [Arrived(f"c{i}", v, n) for i, (v, n) in enumerate(requests)]
    for request in waiting:
        fall.add(request)
    placed = fall.place()
    assert all(held[engine][0] >= request.version for request, engine in placed)
    assert len(placed) + len(fall.waiting) == len(waiting)
    due = [request.version for request, _ in placed]
    assert due == sorted(due)
    assert max(due, default=0) <= min((request.version for request in fall.waiting.values()), default=3)
    for name in held:  # when all that runs has left, every call that may go somewhere does
        found.opened(name, held[name][0], LONG)
    assert not [request for request in fall.waiting.values() if found.legal(request.version)] or fall.place()


def engine(name: str, version: int, kv: int, running: int, extra: float = 0.0) -> OpenEngine:
    return OpenEngine(name, version, LONG, running=running, kv=kv, extra=extra)


def moved(
    found: list[OpenEngine], inside: dict[str, list[Movable]], choice: Choice = LATE, **given: int
) -> list[tuple[str, str, str]]:
    return moves(found, lambda name: inside.get(name, []), choice, MigrationSettings(**given))  # type: ignore[arg-type]


def test_the_latest_and_longest_move_to_the_emptiest_engine() -> None:
    late = [Movable("young", 1, 100, 8.0), Movable("old", 0, 300, 64.0), Movable("older", 0, 500, 64.0)]
    others = [Movable(f"c{i}", 2, 100) for i in range(17)]
    crowded = engine("a", 2, 2600, 20, extra=7.0 + 2 * 63)
    found = [crowded, engine("b", 2, 0, 0), engine("c", 2, 400, 4)]
    assert moved(found, {"a": others + late}, per_engine=1) == [("older", "a", "b"), ("old", "a", "c")]
    assert crowded.running == 20  # it is not changed: nothing has happened yet
    assert moved(found, {"a": others + late}, Choice("gain", 0.3, 1.0), per_engine=1) != [("older", "a", "b")]


def test_a_late_call_does_not_move_below_its_v_nor_where_it_gains_less_than_its_prefill() -> None:
    late = [Movable("late", 1, 500, 8.0)]
    crowded = engine("a", 2, 2500, 2, extra=7.0)
    assert moved([crowded, engine("b", 0, 0, 0)], {"a": late}) == []
    assert moved([crowded, engine("b", 1, 0, 0)], {"a": late}) == [("late", "a", "b")]
    longer = Movable("longer", 2, 600, 8.0)
    assert moved([crowded, engine("b", 1, 0, 0)], {"a": [longer, *late]}) == [("late", "a", "b")]
    assert moved([crowded, engine("b", 1, 1990, 1)], {"a": late}) == []


@given(
    st.dictionaries(NAMES, st.tuples(st.integers(0, 3), st.lists(EACH, max_size=12)), min_size=2, max_size=6),
    st.sampled_from([2.0, 16.0]),
)
def test_what_moves_may_be_sampled_there_and_the_sum_grows(
    held: dict[str, tuple[int, list[tuple[int, int]]]], late_call_weight: float
) -> None:
    choice = Choice("gain", min_gain_share=0.1, late_call_weight=late_call_weight)
    found = Engines(choice)
    found.published(3)
    inside: dict[str, list[Movable]] = {}
    for name, (version, runs) in held.items():
        legal = [(v, n) for v, n in runs if v <= version]
        found.opened(name, version, LONG, legal)
        inside[name] = [Movable(f"{name}-{i}", v, n, found.weight(v)) for i, (v, n) in enumerate(legal)]
    planned = moved(list(found.open.values()), inside, choice, gap_above=100)
    assume(planned)
    by_name = {call.call: call for runs in inside.values() for call in runs}
    before = _worth(found, inside)
    for call, source, target in planned:
        assert by_name[call].version <= held[target][0]
        inside[source].remove(by_name[call])
        inside[target].append(by_name[call])
    assert _worth(found, inside) > before


def _worth(found: Engines, inside: dict[str, list[Movable]]) -> float:
    """The sum over the calls of what each counts times its speed."""
    worth = 0.0
    for name, runs in inside.items():
        step_s = found.open[name].model.step_s(len(runs), sum(call.length for call in runs))
        worth += sum(call.weight for call in runs) / step_s
    return worth

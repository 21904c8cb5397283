"""The keys of the report, by hand."""

from __future__ import annotations

from scheduler.simulate.registry import PLANNED
from scheduler.simulate.report import goals
from scheduler.simulate.study import Outcome


def outcome(policy: str, rate: float, stale: int = 0) -> Outcome:
    return Outcome("s", policy, ({"tokens_per_s": rate, "staleness_max": stale, "idle_share": 0.02},))


def test_only_baselines_that_keep_the_bound_are_rivals() -> None:
    some = [
        outcome("sync_colocated", 10),
        outcome("roll_flash", 20, 1),
        outcome("areal", 100, 5),
        outcome("combined", 30, 1),
    ]
    other = [outcome("sync_colocated", 10), outcome("staleflow", 10, 1), outcome("combined", 9, 1)]
    told = goals({"large-32b-1024": some, "b": other}, {"large-32b-1024": 1, "b": 1})
    assert told == {
        "vs_sync": 3.0,
        "vs_best_async": 1.5,
        "worst_vs_any": 0.9,
        "vs_best_async_unbounded": 0.9,
        "worst_vs_any_unbounded": 0.3,
        "idle_1024": 0.02,
    }


def test_the_planned_split_is_reported_apart_and_is_no_rival() -> None:
    some = [outcome("roll_flash", 20, 1), outcome("combined", 30, 1), outcome("combined_planned", 40, 1)]
    found, etas = {"a": some}, {"a": 1}
    assert (goals(found, etas)["worst_vs_any"], goals(found, etas, PLANNED)["worst_vs_any"]) == (1.5, 2.0)


def test_without_a_policy_of_our_own_there_is_no_figure() -> None:
    told = goals({"a": [outcome("sync_colocated", 10)]}, {"a": 1})
    assert set(told.values()) == {None}

"""The keys of the report, by hand."""

from __future__ import annotations

import pytest
import typer

from lab.simulate.registry import PLANNED
from lab.simulate.report import goals, main
from lab.simulate.study import Outcome


def outcome(policy: str, rate: float, stale: int = 0, older: float = 0.0) -> Outcome:
    return Outcome(
        "s",
        policy,
        (
            {
                "tokens_per_s": rate,
                "bounded_tokens_per_s": rate - older,
                "staleness_max": stale,
                "ub_fraction": rate / 40,
                "useful_share": rate / 50,
            },
        ),
    )


def test_only_baselines_that_keep_the_bound_are_rivals() -> None:
    some = [
        outcome("sync_colocated", 10),
        outcome("roll_flash", 20, 1),
        outcome("areal", 100, 5, older=75),
        outcome("combined", 30, 1),
    ]
    other = [outcome("sync_colocated", 10), outcome("staleflow", 10, 1), outcome("combined", 9, 1)]
    figures = goals({"a": some, "b": other}, {"a": 1, "b": 1})
    assert figures == {
        "ub_fraction_geomean": pytest.approx((0.75 * 0.225) ** 0.5),
        "ub_fraction_worst": 0.225,
        "vs_best_bounded_geomean": pytest.approx((1.5 * 0.9) ** 0.5),
        "vs_best_bounded_worst": 0.9,
        "vs_best_masked_geomean": pytest.approx((1.2 * 0.9) ** 0.5),
        "vs_best_masked_worst": 0.9,
        "vs_sync_max": 3.0,
        "useful_share": pytest.approx(0.39),
    }


def test_the_planned_split_is_reported_apart_and_is_no_rival() -> None:
    some = [outcome("roll_flash", 20, 1), outcome("combined", 30, 1), outcome("combined_planned", 40, 1)]
    found, etas = {"a": some}, {"a": 1}
    own, planned = goals(found, etas), goals(found, etas, PLANNED)
    assert (own["vs_best_bounded_worst"], planned["vs_best_bounded_worst"]) == (1.5, 2.0)


def test_without_a_policy_of_our_own_there_is_no_figure() -> None:
    figures = goals({"a": [outcome("sync_colocated", 10)]}, {"a": 1})
    assert set(figures.values()) == {None}


def test_a_policy_that_there_is_not_is_refused_before_anything_runs() -> None:
    with pytest.raises(typer.BadParameter, match="no policy nonsense; there are: sync_colocated, "):
        main(policy=["combined", "nonsense"])

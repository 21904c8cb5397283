"""What the defaults make of hazards and of random clusters. Every figure is simulated."""

from __future__ import annotations

import pytest

from tests.unit.lab.simulate.hazards import HAZARDS, Hazard, cluster, share_of_best


def check(hazard: Hazard, seed: int) -> None:
    """Check that the defaults are near the better rule, and that nothing is idle, starves or thrashes."""
    ours, share = share_of_best(hazard, seed)
    assert share >= (0.75 if hazard.dies_s else 0.9)  # cluster 159 (lab/notes/scheduler.md)
    assert ours.idle_s < 5.0
    assert ours.wait_s < max(10.0, ours.seconds / 4)
    # A call may leave an engine for one that returns
    assert ours.moves_per_call < 2.0 + ours.deaths / ours.engines
    assert ours.pulls_per_version <= 1.0


@pytest.mark.parametrize("name", HAZARDS)
def test_the_defaults_are_near_the_better_rule_in_a_hazard(name: str) -> None:
    check(HAZARDS[name], seed=0)


@pytest.mark.parametrize("seed", [7, 14, 22])
def test_the_defaults_are_near_the_better_rule_in_a_random_cluster(seed: int) -> None:
    check(cluster(seed), seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 160))
def test_the_same_in_many(seed: int) -> None:
    check(cluster(seed), seed)

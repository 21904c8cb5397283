"""Identification of an engine's weights by its log-probabilities."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.probe import ProbeReport, judge

NEW = [-1.0, -2.0, -0.5, -3.0]
PARENT = [-2.0, -1.0, -1.5, -2.0]


def verdict(
    measured: list[float], expected: list[float] = NEW, parent: list[float] = PARENT, noise: float = 0.0
) -> ProbeReport:
    return judge(measured, expected, parent, tolerance=0.15, noise=noise)


def test_the_right_engine_passes_with_a_margin_of_one() -> None:
    report = verdict(NEW)
    assert report.verdict == "passed"
    assert (report.gap, report.parent_gap, report.distance, report.margin) == (0, 1, 1, 1)


def test_a_stale_engine_fails_with_a_margin_of_minus_one() -> None:
    report = verdict(PARENT)
    assert report.verdict == "failed"
    assert (report.gap, report.parent_gap, report.margin) == (1, 0, -1)


def test_an_engine_that_took_over_half_of_the_weights_fails() -> None:
    half = [*NEW[:2], *PARENT[2:]]
    report = verdict(half)
    assert (report.verdict, report.margin) == ("failed", None)


def test_noise_does_not_fail_the_right_engine() -> None:
    report = verdict([x + 0.01 * (-1) ** i for i, x in enumerate(NEW)])
    assert report.verdict == "passed"
    assert report.gap == pytest.approx(0.01)


def test_a_stale_engine_fails_although_the_versions_are_close() -> None:
    """Within the tolerance of both: being closer to the parent decides, where the engine is exact enough."""
    parent = [x + 0.01 for x in NEW]
    assert verdict(parent, NEW, parent, noise=0.002).verdict == "failed"
    assert verdict(NEW, NEW, parent, noise=0.002).verdict == "passed"


def test_versions_closer_than_a_few_times_the_measured_noise_are_indistinct() -> None:
    """Rounding in bf16: at the recipes' rate the version is as near to its parent as the engine is to either."""
    parent = [x + 0.01 for x in NEW]
    for measured in (NEW, parent):
        report = verdict(measured, NEW, parent, noise=0.003)
        assert (report.verdict, report.margin) == ("indistinct", None)
    noisy = [
        x + 0.006 * (-1) ** i for i, x in enumerate(parent)
    ]  # the engine's own noise, measured nowhere else
    assert verdict(noisy, NEW, parent).verdict == "indistinct"


def test_an_engine_that_is_proven_to_hold_the_version_is_judged_by_the_tolerance_alone() -> None:
    parent = [x + 0.01 for x in NEW]
    assert judge(parent, NEW, parent, tolerance=0.15, proven=True).verdict == "passed"
    assert judge([x + 1 for x in NEW], NEW, parent, tolerance=0.15, proven=True).verdict == "failed"


def test_a_proven_engine_may_be_as_far_off_as_several_of_its_usual_gaps() -> None:
    """float8 rounds so much that the gap of right engines passes a constant now and then."""

    def verdict(gap: float, usual: float, *, proven: bool) -> str:
        measured = [x + gap for x in NEW]
        return judge(measured, NEW, PARENT, tolerance=0.15, usual=usual, proven=proven).verdict

    assert verdict(0.16, 0.1, proven=True) == "passed"
    assert verdict(0.16, 0.0, proven=True) == verdict(0.16, 0.1, proven=False) == "failed"
    assert verdict(0.41, 0.1, proven=True) == "failed"


def test_an_engine_of_neither_version_fails() -> None:
    assert verdict([x - 5 for x in NEW]).verdict == "failed"


def test_equal_versions_are_indistinct() -> None:
    assert verdict(NEW, NEW, NEW).verdict == "indistinct"
    assert verdict([x + 1 for x in NEW], NEW, NEW).verdict == "failed"


def test_the_first_version_is_judged_by_the_tolerance_alone() -> None:
    report = verdict(NEW, NEW, [])
    assert (report.verdict, report.parent_gap, report.margin) == ("passed", None, None)
    assert verdict(PARENT, NEW, []).verdict == "failed"


def test_numbers_that_are_none_fail() -> None:
    nan = float("nan")
    assert verdict([nan] * 4).verdict == "failed"
    assert verdict([nan] * 4, NEW, []).verdict == "failed"


def test_lists_of_different_lengths_are_no_probe() -> None:
    with pytest.raises(ValueError, match="zip"):
        verdict(NEW[:-1])
    with pytest.raises(ValueError, match="zip"):
        verdict(NEW, NEW, PARENT[:-1])


def test_a_report_is_plain_json() -> None:
    assert verdict(NEW).to_json() == {
        "verdict": "passed",
        "gap": 0,
        "parent_gap": 1,
        "distance": 1,
        "noise": 0,
        "margin": 1,
    }


logprobs = st.lists(st.floats(-9, 0), min_size=4, max_size=4)


@given(logprobs, logprobs, st.floats(0.0001, 1))
def test_a_right_engine_fails_only_with_a_gap_of_three_times_the_measured_noise(
    expected: list[float], parent: list[float], noise: float
) -> None:
    for size in (0.5, 1.0, 2.99):
        measured = [x + noise * size * (-1) ** i for i, x in enumerate(expected)]
        report = judge(measured, expected, parent, tolerance=math.inf, noise=noise)
        assert report.verdict != "failed"


@given(logprobs, logprobs, logprobs)
def test_an_engine_that_passes_is_never_closer_to_the_parent(
    measured: list[float], expected: list[float], parent: list[float]
) -> None:
    report = verdict(measured, expected, parent)
    assert report.parent_gap is not None
    if report.verdict == "passed":
        assert report.gap < report.parent_gap
        assert report.gap <= 0.15
        assert report.margin is not None
        assert 0 < report.margin <= 1 + 1e-9

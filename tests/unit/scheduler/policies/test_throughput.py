"""The engine model, by numbers worked out by hand."""

from __future__ import annotations

import pytest

from scheduler.policies.throughput import EngineModel

MODEL = EngineModel(s_per_kv_token=0.001, s_per_batch=1.0, s_per_call=0.5, s_per_step=1.0)


def test_a_step_reads_the_cache_does_the_batch_and_costs_something_fixed() -> None:
    assert MODEL.step_s(1, 0) == 2.0
    assert MODEL.step_s(2, 1000) == 3.0
    assert MODEL.step_s(4, 1000) == pytest.approx(4.0)


def test_the_rate_is_calls_by_step() -> None:
    assert MODEL.rate(0, 0) == 0.0
    assert MODEL.rate(2, 0) == 1.0
    assert MODEL.rate(4, 1000) == pytest.approx(1.0)


def test_the_gain_of_an_empty_engine_is_the_ideal_one_and_a_long_call_may_cost_more_than_it_adds() -> None:
    assert MODEL.gain(0, 0, 1000) == MODEL.alone(1000) == pytest.approx(1 / 3)
    assert MODEL.gain(2, 0, 0) == pytest.approx(3 / 2.5 - 1.0)
    assert MODEL.gain(2, 0, 2000) < 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"s_per_kv_token": -1.0},
        {"s_per_batch": -1.0},
        {"s_per_call": -1.0},
        {"s_per_step": -1.0},
        {"s_per_batch": 0.0, "s_per_call": 0.0, "s_per_step": 0.0},
    ],
)
def test_coefficients_that_no_engine_has_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="coefficients"):
        EngineModel(**wrong)

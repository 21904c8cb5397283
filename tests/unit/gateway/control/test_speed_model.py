"""Coefficients are recovered from a simulated engine's reports; those without evidence stay at the prior."""

from __future__ import annotations

import random

import pytest

from gateway.control.speed_model import Sample, SpeedModels, fit
from gateway.engines.base import Load, StepCounts
from scheduler.policies.throughput import EngineModel

TRUE = EngineModel(s_per_kv_token=2e-7, s_per_batch=8e-3, s_per_call=2e-4, s_per_step=3e-3)
PRIOR = EngineModel(s_per_kv_token=1e-7, s_per_batch=5e-3, s_per_call=1e-4, s_per_step=5e-3)


def load(sampled: int, counts: StepCounts | None = None) -> Load:
    return Load(0, 0, 0, sampled, counts)


def seconds(
    count: int,
    most: int,
    *,
    noise: float = 0.03,
    outliers: float = 0.0,
    lengths: tuple[int, int] = (200, 8000),
) -> list[Sample]:
    rng, found = random.Random(7), []
    for _ in range(count):
        running = rng.randint(1, most)
        kv = running * rng.randint(*lengths)
        factor = rng.gauss(1.0, noise) * (rng.uniform(2, 6) if rng.random() < outliers else 1.0)
        found.append(Sample(running, kv, TRUE.step_s(running, kv) * factor))
    return found


@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_coefficients_are_found_again_from_noisy_seconds_with_outliers(outliers: float) -> None:
    found = fit(seconds(300, 160, outliers=outliers), PRIOR)
    assert found.model.s_per_kv_token == pytest.approx(TRUE.s_per_kv_token, rel=0.1)
    assert found.model.s_per_call == pytest.approx(TRUE.s_per_call, rel=0.2)
    assert found.error < 0.05
    for running, kv in ((1, 1000), (20, 60_000), (100, 300_000), (160, 900_000)):
        assert found.model.step_s(running, kv) == pytest.approx(TRUE.step_s(running, kv), rel=0.08)


def test_coefficients_without_evidence_stay_at_the_prior() -> None:
    """Eight calls never leave the flat part: s_per_call is unknown, and s_per_batch is known only together with s_per_step."""
    found = fit(seconds(200, 8), PRIOR)
    assert found.model.s_per_call == PRIOR.s_per_call
    assert found.model.s_per_batch + found.model.s_per_step == pytest.approx(
        TRUE.s_per_batch + TRUE.s_per_step, rel=0.1
    )
    assert found.model.s_per_batch == pytest.approx(found.model.s_per_step, rel=1e-6)  # as in the prior


def test_no_coefficient_is_negative_and_the_same_seconds_give_the_same() -> None:
    short = seconds(60, 40, noise=0.5, lengths=(1, 5))
    found = fit(short, PRIOR)
    assert (
        min(
            found.model.s_per_kv_token,
            found.model.s_per_batch,
            found.model.s_per_call,
            found.model.s_per_step,
        )
        >= 0
    )
    assert fit(short, PRIOR) == found
    with pytest.raises(ValueError, match="samples"):
        fit([], PRIOR)


def test_what_a_prompt_adds_to_a_step_is_no_part_of_a_decode_step() -> None:
    rng = random.Random(5)
    prompts = [rng.choice([0.0, 0.0, 30.0, 200.0, 600.0]) for _ in range(300)]
    mixed = [
        Sample(one.running, one.kv, one.step_s + 4e-4 * prompt, prompt)
        for one, prompt in zip(seconds(300, 160), prompts, strict=True)
    ]
    found = fit(mixed, PRIOR)
    assert found.prefill_s == pytest.approx(4e-4, rel=0.1)
    for running, kv in ((1, 1000), (40, 60_000), (160, 900_000)):
        assert found.model.step_s(running, kv) == pytest.approx(TRUE.step_s(running, kv), rel=0.08)


def test_an_engine_is_fitted_after_enough_samples_and_forgotten_when_removed() -> None:
    fits, rng, sampled = SpeedModels(PRIOR), random.Random(3), 0.0
    for second in range(60):
        running = 40 + rng.randint(-2, 2)
        kv = 2000 * running
        fits.observe("e", 1, float(second), running, kv, load(int(sampled)))
        sampled += TRUE.rate(running, kv)
        assert second >= 20 or fits.describe()["e"]["error"] is None
    ((name, model),) = fits.changed()
    assert name == "e"
    assert model.rate(40, 80_000) == pytest.approx(TRUE.rate(40, 80_000), rel=0.05)
    assert fits.changed() == []
    fits.forget(())
    assert fits.describe() == {}


def test_an_engine_that_is_ten_times_slower_is_known_after_its_first_sample() -> None:
    fits = SpeedModels(PRIOR)
    for second in range(2):
        for name, slower in (("fast", 1.0), ("slow", 10.0)):
            assert fits.models() == {} or second
            step_s = slower * TRUE.step_s(20, 20_000)
            counts = StepCounts(100 * second, 0, 2000 * second, 2000 * second * step_s)
            fits.observe(name, 1, 2.0 * second, 20, 20_000, load(2000 * second, counts))
    found = dict(fits.changed())
    assert found["slow"].step_s(50, 9000) == pytest.approx(10 * found["fast"].step_s(50, 9000))
    assert found["fast"].step_s(20, 20_000) == pytest.approx(TRUE.step_s(20, 20_000))
    assert fits.changed() == []


def test_a_second_with_a_changed_load_or_a_restart_gives_no_sample() -> None:
    fits = SpeedModels(PRIOR)
    fits.observe("e", 1, 0.0, 10, 1000, load(0))
    assert fits.observe("e", 1, 1.0, 40, 4000, load(500)) == 500.0
    assert fits.observe("e", 2, 2.0, 40, 4000, load(900)) == 0.0
    assert fits.observe("e", 2, 3.0, 40, 4000, load(100)) == 0.0
    assert fits.describe()["e"]["samples"] == 0


def test_an_engine_that_counts_its_steps_is_believed_however_little_of_the_second_it_was_busy() -> None:
    """An engine that is idle for half of each second, and computes 25 tokens of prompts in each step."""
    fits, steps, sampled, prompts, gaps_s = SpeedModels(PRIOR), 0, 0, 0, 0.0
    for second in range(40):
        counts = StepCounts(steps, prompts, sampled, gaps_s)
        fits.observe("e", 1, float(second), 20, 40_000, load(sampled, counts))
        step_s = TRUE.step_s(16, 40_000) + 2e-4 * 25
        done = int(0.5 / step_s)
        steps, sampled, prompts = steps + done, sampled + 16 * done, prompts + 25 * done
        gaps_s += 16 * done * step_s
    found = fits.describe()["e"]
    assert (found["samples"], found["error"]) == (39, pytest.approx(0.0, abs=0.02))
    predicted = fits.models()["e"].step_s(16, 40_000) + found["prefill_s"] * 25
    assert predicted == pytest.approx(step_s, rel=0.02)


@pytest.mark.parametrize("counts", [False, True])
def test_a_sample_of_a_slow_engine_is_as_many_seconds_as_it_takes_to_hold_steps(counts: bool) -> None:
    """Three steps a second: a sample every third second."""
    fits = SpeedModels(PRIOR)
    for second in range(13):
        steps = 3 * second
        counted = StepCounts(steps, 0, 10 * steps, 10 * second) if counts else None
        fits.observe("e", 1, float(second), 10, 9000, load(10 * steps, counted))
    assert fits.describe()["e"]["samples"] == 4

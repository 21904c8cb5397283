"""The upper bound: by hand where nothing is drawn, and above every policy that keeps the bound on staleness."""

from __future__ import annotations

from typing import Any

import pytest

from lab.simulate.engine import EngineCosts, PaperModel
from lab.simulate.hardware import TrainerCosts
from lab.simulate.registry import POLICIES
from lab.simulate.scenario import Scenario
from lab.simulate.study import simulate
from lab.simulate.upper_bound import UpperBound
from tests.unit.lab.simulate.scenarios import scenario

ENGINE = EngineCosts(
    PaperModel(s_per_kv_token=1e-6, s_per_batch=0.02, s_per_call=0.001, s_per_step=0.01),
    prefill_s=1e-4,
    capacity=50_000,
    slots=64,
)
TRAINER = TrainerCosts(token_s=1e-3, recompute_s=0.0, step_s=2.0, spread=0.0)


def plain(**values: Any) -> Scenario:
    """8 GPUs; 2 groups of 2 replies of exactly 100 tokens after 50."""
    given = {
        "gpus": 8,
        "batch": 2,
        "group": 2,
        "eta": 1,
        "prompt": 50,
        "lengths": {"kind": "constant", "median": 100, "longest": 100},
        "engine_costs": ENGINE,
        "trainer_costs": TRAINER,
    }
    return Scenario(**{**given, **values})


def test_each_term_is_what_a_hand_computes() -> None:
    found = UpperBound.of(plain(), 0)
    assert found.tokens == 400
    assert found.train_s == pytest.approx(4 * 150 * 1e-3 / 8 + 2.0)
    # 8 calls may live, all in one engine; a token at context c reads c tokens. The prompt is computed once for each group.
    contexts = sum(range(50, 150)) * 4
    generation = contexts * 1e-6 + 400 * (0.02 / 8 + 0.01 / 8) + 2 * 50 * 1e-4
    assert found.busy_s == pytest.approx((generation + 600 * 1e-3) / 8)
    alone = 50 * 1e-4 + 100 * (0.02 + 0.01) + sum(range(50, 150)) * 1e-6
    assert found.longest_s == pytest.approx((alone + 2.0) / 2)
    assert (found.binding, found.batch_s) == ("longest episode", found.longest_s)
    assert found.tokens_per_s == pytest.approx(400 / found.longest_s)


def test_tools_lengthen_the_longest_episode_and_only_new_tokens_are_computed() -> None:
    turns = {"mean": 100.0, "most": 2, "result": 30, "wait_s": 0.0}
    one, two = UpperBound.of(plain(), 0), UpperBound.of(plain(turns=turns), 1)
    assert two.tokens > one.tokens
    waits = UpperBound.of(plain(turns={**turns, "wait_s": 5.0}), 1)
    assert waits.longest_s > two.longest_s
    assert waits.busy_s == two.busy_s, "an engine works on other calls during the wait"


@pytest.mark.parametrize(
    ("values", "binding"),
    [
        ({"eta": 16, "batch": 64, "group": 8}, "GPUs"),
        ({"eta": 16, "trainer_costs": TrainerCosts(1e-3, 0.0, 30.0, 0.0)}, "training"),
    ],
)
def test_what_limits_is_named(values: dict[str, Any], binding: str) -> None:
    assert UpperBound.of(plain(**values), 0).binding == binding


def test_calls_are_no_denser_than_slots_and_cache_allow() -> None:
    crowd = {"batch": 64, "group": 8}
    free = UpperBound.of(plain(**crowd), 0).busy_s
    slots = UpperBound.of(plain(**crowd, engine_costs=EngineCosts(ENGINE.model, 1e-4, 50_000, 4)), 0).busy_s
    cache = UpperBound.of(plain(**crowd, engine_costs=EngineCosts(ENGINE.model, 1e-4, 400, 64)), 0).busy_s
    assert slots == pytest.approx(cache, rel=0.05), "4 calls of 100 tokens in the mean, either way"
    assert slots > 1.5 * free


def test_with_engines_of_several_sizes_each_term_is_that_of_the_best() -> None:
    values = {
        "gpus": 16,
        "batch": 8,
        "eta": 1,
        "lengths": {"kind": "constant", "median": 2000, "longest": 2000},
    }
    small, large = (UpperBound.of(scenario(**values, engine_gpus=gpus), 0) for gpus in (1, 4))
    both = UpperBound.of(scenario(**values, engines_of={4: 1}), 0)
    assert large.longest_s < small.longest_s and large.busy_s > small.busy_s
    assert (both.longest_s, both.busy_s) == (large.longest_s, small.busy_s)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "combined_planned"])
def test_no_policy_that_keeps_the_bound_is_above_it(policy: str) -> None:
    given = scenario(batches=14, warmup=2)
    figures = simulate(given, POLICIES[policy](), 3)
    if figures["staleness_max"] <= given.eta:
        assert figures["ub_fraction"] <= 1.0
        assert figures["useful_share"] <= 1.0 - figures["idle_share"]

"""Weight updates and a killed engine lose, double and mislabel no token, and each mutant is caught for what it is."""

from __future__ import annotations

import pytest

from tests.faults import mutants
from tests.faults.mutants import Mutant
from tests.faults.real.updates import Plan, run_trial, small


@pytest.mark.parametrize(
    ("mode", "order", "updates"),
    [
        ("abort", "pull", 4),
        ("keep", "rolling", 4),
        pytest.param("keep", "pull", 8, marks=pytest.mark.long),
        pytest.param("abort", "rolling", 8, marks=pytest.mark.long),
    ],
)
async def test_updates_and_a_killed_engine_lose_and_mislabel_nothing(
    mode: str, order: str, updates: int
) -> None:
    plan = Plan(mode=mode, order=order, updates=updates, streams=2 * updates, agents=updates, seed=1)
    trial = await run_trial(plan, print)
    assert trial.problems == []
    assert trial.report.right
    assert trial.report.facts["tokens"] > 1000
    assert len(trial.updates) == updates


@pytest.mark.parametrize(
    ("mutant", "mode"),
    [  # the virtual cluster catches the others in a second (virtual/test_mutants.py)
        pytest.param(m, mode, marks=[pytest.mark.long] * (mode == "abort" or m.virtual))
        for m in mutants.of("updates")
        for mode in m.modes
    ],
    ids=lambda v: str(getattr(v, "name", v)),
)
async def test_each_mutant_is_caught(mutant: Mutant, mode: str) -> None:
    trial = await run_trial(small(Plan(mode=mode)), print, mutant)
    assert mutant.caught_by(trial.report), (trial.report.first, trial.to_json())


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_two_real_engines_and_a_killed_one_lose_and_mislabel_nothing(mode: str) -> None:
    trial = await run_trial(Plan(engine="vllm", mode=mode, tokens=1600), print)
    assert trial.problems == []
    assert trial.report.right

"""A run's curves have every figure that was posted, by step, on both databases."""

from __future__ import annotations

from sqlalchemy import Engine

from gateway.store import events, trainer_steps
from gateway.store.trainer_steps import TrainerStep


def store(engine: Engine, *steps: TrainerStep) -> None:
    for step in steps:
        with engine.begin() as connection:
            trainer_steps.store_step(connection, step)


def test_an_evaluation_joins_its_step_and_a_repeated_step_replaces_its_figures(engine: Engine) -> None:
    store(
        engine,
        TrainerStep("m", "run", 1, 1, {"loss": 0.5, "reward": 0.1}, "/runs/a"),
        TrainerStep("m", "run", 2, 2, {"loss": 0.4}),
        TrainerStep("m", "run", 1, 1, {"eval/reward_mean": 0.75}),
        TrainerStep("m", "run", 2, 2, {"loss": 0.25}),
        TrainerStep("other", "run", 1, 1, {"loss": 9.0}),
        TrainerStep("m", "another", 7, 8, {"loss": 9.0}),
    )
    with engine.connect() as connection:
        found = trainer_steps.curves(connection, "m", "run")
        later = trainer_steps.curves(connection, "m", "run", after=1, figures=["reward"])
        emitted = [(event.kind, event.data["step"]) for event in events.after(connection, 0, 10)]
        made = trainer_steps.of_version(connection, "m", 1)
    assert (found.step, found.version, found.every) == ([1, 2], [1, 2], 1)
    assert found.figures == {"loss": [0.5, 0.25], "reward": [0.1, None], "eval/reward_mean": [0.75, None]}
    assert (later.step, later.figures) == ([2], {})
    assert emitted[2] == ("trainer.evaluated", 1)
    assert {kind for kind, _ in emitted[:2] + emitted[3:]} == {"trainer.step"}
    assert made is not None
    assert made["folder"] == "/runs/a"


def test_a_long_run_is_thinned_evenly_and_keeps_its_last_step(engine: Engine) -> None:
    with engine.begin() as connection:
        for number in range(1, 96):
            trainer_steps.store_step(
                connection, TrainerStep("m", "", number, number, {"loss": float(number)})
            )
    with engine.connect() as connection:
        found = trainer_steps.curves(connection, "m", "", points=10)
        (run,) = trainer_steps.runs(connection, ["m"])
        assert trainer_steps.runs(connection, []) == []
    assert (found.count, found.every) == (95, 10)
    assert found.step == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    assert found.figures == {"loss": [float(step) for step in found.step]}
    assert (run["steps"], run["first_step"], run["last_step"], run["last_version"]) == (95, 1, 95, 95)

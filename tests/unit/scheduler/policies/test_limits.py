"""What limits a run: figures of steps by hand, and the seconds of engines that they are made of."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from scheduler.policies import limits
from scheduler.policies.limits import PREFIX, RolloutSeconds
from scheduler.policies.throughput import EngineModel

FULL = EngineModel(0.0, 0.0, 0.001, 0.0)
"""Every call costs the same: twice the calls take twice the time."""
EMPTY = EngineModel(0.0, 0.01, 0.0, 0.0)
"""Calls cost nothing: a step always takes 10 ms."""


def step(
    seconds: float, waited: float, eta: int = 1, publish: float = 0.0, **gateway: float
) -> dict[str, float]:
    """Return a step of one rank, in which the gateway saw two full engines sample all the time."""
    busy = seconds - waited
    seen = {"watched": seconds, "filling": seconds, "sampling": seconds, "one_more": seconds * 2 / 3}
    seen |= {
        "twice": seconds,
        "wider": seconds,
        "calls": seconds,
        "episodes": seconds,
        "engines": 2 * seconds,
    }
    trainer = {"total": seconds, "idle": waited, "publish": publish, "compute": busy - publish}
    named = {f"seconds/{name}": value for name, value in trainer.items()}
    return (
        named | {f"{PREFIX}{k}": v for k, v in (seen | gateway).items()} | {"eta": float(eta), "ranks": 1.0}
    )


def changes(steps: list[dict[str, float]]) -> dict[str, float]:
    found = limits.advise(steps)
    assert found is not None
    return {change.name: round(change.gain, 4) for change in found.changes}


def test_stages_that_overlap() -> None:
    """Generation takes 12 s and training 6: an engine more makes 8 of the 12, and a rank more nothing."""
    steps = [step(12.0, 6.0)] * 5
    assert changes(steps) == {
        "one more engine": 0.5,
        "one more rank": 0.0,
        "half as many engines of twice the GPUs": 0.0,
    }
    assert (
        limits.line(steps)
        == "generation limits 50% of the time; one more engine: +50% predicted (+50% to +50%)"
    )
    # Training takes 11 of 12 s, which is what is left of a step however fast engines are.
    assert changes([step(12.0, 1.0)] * 5)["one more engine"] == round(12 / 11 - 1, 4)


def test_stages_that_take_turns() -> None:
    """With eta 0, 6 s of generation, then 6 of training: 4 + 6 with an engine more, 6 + 3 with a rank, and 6 s with eta 1."""
    steps = [step(12.0, 6.0, eta=0, filling=6.0)] * 5
    assert changes(steps) == {
        "eta 1": 1.0,
        "one more rank": round(12 / 9 - 1, 4),
        "one more engine": 0.2,
        "half as many engines of twice the GPUs": 0.0,
    }


def test_a_trainer_that_never_waits_limits_also_while_batches_fill() -> None:
    found = limits.advise([step(10.0, 0.0, publish=2.0)] * 5)
    assert found is not None and (found.stage, round(found.share, 2)) == ("training", 0.8)
    assert str(found) == "training limits 80% of the time; one more rank: at most +67% predicted"
    blocked = limits.advise([step(10.0, 0.0, publish=9.0)] * 5)
    assert str(blocked).startswith("updates limit 90% of the time")


def test_time_outside_of_calls_gets_no_shorter() -> None:
    """A quarter of an episode's time is in calls, of which a third is saved; and more episodes wait than may run."""
    found = limits.advise([step(12.0, 6.0, calls=3.0, wider=9.0)] * 5)
    assert found is not None and found.stage == "agents"
    assert {c.name: c.gain for c in found.changes}["one more engine"] == pytest.approx(1 / (1 - 0.25 / 3) - 1)
    assert "a larger eta" in limits.line([step(12.0, 6.0, wider=9.0)] * 5)


def test_the_interval_is_of_the_steps() -> None:
    alike, unlike = [step(12.0, 6.0)] * 6, [step(12.0, waited) for waited in (0.0, 6.0, 1.0, 5.0, 0.0, 6.0)]
    for steps, wide in ((alike, False), (unlike, True)):
        found = limits.advise(steps)
        assert found is not None
        change = next(one for one in found.changes if one.name == "one more engine")
        assert change.low <= change.gain <= change.high
        assert (change.high - change.low > 0.1) is wide


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "0 of 5 steps seen"),
        ([{"eval/reward_mean": 1.0}, *[step(12.0, 6.0)] * 3], "3 of 5 steps seen"),
        ([step(0.2, 0.1)] * 6, "watched 1 of 5 s"),
        ([{"seconds/total": 3.0, "seconds/idle": 1.0}] * 6, "watched 0 of 5 s"),
    ],
)
def test_too_few_steps_are_no_advice(steps: list[dict[str, float]], words: str) -> None:
    assert limits.advise(steps) is None
    assert words in limits.line(steps) == limits.to_json(steps)["line"]


def test_a_step_between_two_looks_of_the_gateway_counts_as_the_others_do() -> None:
    short = {name: value for name, value in step(1.0, 0.5).items() if not name.startswith(PREFIX)}
    assert changes([*[step(12.0, 6.0)] * 5, short])["one more engine"] == 0.5


@pytest.mark.parametrize(
    ("model", "waiting", "share"),
    [
        (FULL, 0, {"one_more": 2 / 3, "twice": 1.0, "wider": 1.0}),
        (EMPTY, 0, {"one_more": 1.0, "twice": 0.5, "wider": 2 / 3}),
        (EMPTY, 4, {"one_more": 2 / 3, "twice": 0.5, "wider": 1.0}),  # those that wait would run
    ],
)
def test_what_engines_would_do(model: EngineModel, waiting: int, share: dict[str, float]) -> None:
    """Two engines with four calls each, for two seconds; then nothing for one."""
    seconds = RolloutSeconds()
    seconds.add(2.0, [(model, 4.0, 0.0)] * 2, waiting, 10, True, more_calls=1.5)
    seconds.add(1.0, [(model, 0.0, 0.0)] * 2, 0, 10, False)
    counted: dict[str, Any] = asdict(seconds)
    expected = {name: pytest.approx(2 * value) for name, value in share.items()}
    assert counted == expected | {
        "watched": 3.0,
        "filling": 2.0,
        "sampling": 2.0,
        "episodes": 30.0,
        "engines": 6.0,
        "calls": 2.0 * (8 + waiting),
    }
    seconds.add(60.0, [], 0, 0, True)  # a suspended gateway saw nothing
    assert asdict(seconds) == counted


def test_another_coordinator_counts_from_0() -> None:
    assert limits.since({"watched": 5.0}, {"watched": 9.0}) == {f"{PREFIX}watched": 4.0}
    assert limits.since({"watched": 5.0}, {"watched": 1.0}) == limits.since({"watched": 5.0}, {}) == {}

"""The benches of the reactors run, small and without Ray, and what they compare is compared. No figure is asserted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import reactor_broadcast, reactor_gym, reactor_marl, reactor_qlearning
from bench.control import Plan, measure
from bench.reactor import GOALS, keys
from bench.reactor_sides import Result, Side, take_turns
from tests.unit.bench.reports import report_of

SMALL: dict[str, Callable[[], dict[str, Callable[[], Side]]]] = {
    "broadcast": lambda: reactor_broadcast.sides(0.01, 5, ray=False),
    "gym": lambda: reactor_gym.sides("CartPole-v1", ray=False, count=3),
    "blackjack": lambda: reactor_gym.sides("Blackjack-v1", ray=False, count=3),
    "pendulum": lambda: reactor_gym.sides("Pendulum-v1", ray=False, count=2),
    "agents": lambda: reactor_marl.sides(4, ray=False),
    "qlearning": lambda: reactor_qlearning.sides(16, ray=False, actors=2, steps=5),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_sides_come_to_the_same(name: str) -> None:
    """`take_turns` raises if they do not."""
    result = take_turns(SMALL[name](), rounds=4, turns=3)
    assert {side: len(seconds) for side, seconds in result.seconds.items()} == {"headgate": 3, "floor": 3}
    assert (result.ratio("floor") or 0) > 0
    assert result.ratio("ray") is None


class _Wrong:
    def play(self, rounds: int) -> Any:
        return "something else"

    def close(self) -> None:
        pass


def test_a_side_that_comes_to_something_else_is_named() -> None:
    with pytest.raises(ValueError, match="headgate and wrong differ"):
        take_turns({**SMALL["agents"](), "wrong": _Wrong}, rounds=2, turns=1)


def test_the_keys_are_the_goals() -> None:
    names = ["broadcast 10 x 16", "qlearning 500", "agents 10", *(f"gym {n}" for n in reactor_gym.NAMES)]
    seconds = {"headgate": [1.0, 2.0, 1.0], "ray": [2.0, 2.0, 3.0], "floor": [0.5, 0.5, 0.5]}
    figures = keys({name: Result(seconds) for name in names})
    assert list(figures) == list(GOALS)
    assert (figures["broadcast_16"], figures["loop_gym"], figures["qlearning_time_saved"]) == (2.0, 0.5, 50.0)


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    size = ["--no-ray", "--turns", "1", "--scale", "0.005", "--only", "agents"]
    report = report_of("reactor", tmp_path / "reactor.json", *size)
    assert set(report["ms"]) == {"agents 4", "agents 10"}
    assert report["loop_marl"] > 0
    assert report["marl_10"] is None


@pytest.mark.long
def test_the_control_program_is_told_and_measured(tmp_path: Path) -> None:
    plan = Plan(engines=8, calls=400, call_s=2.0, episode_calls=2, group=4, tick_ms=20)
    result = measure(plan, 3.0, tmp_path)
    assert result["open_calls"] > 350, "what ends is replaced, and placed"
    assert 300 < result["left_per_s"] * 3 < 900
    assert result["refused_per_s"] == 0
    assert set(result["events_per_s"]) == {"calls", "batch", "snapshot"}
    assert result["share_of_a_core"] > 0
    assert result["recording_mb_per_s"] > 0

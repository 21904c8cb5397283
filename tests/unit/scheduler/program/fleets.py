"""Fleets and their changes, for the tests of updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduler.program.events import StepCommand
from tests.unit.scheduler.program.world import Outcome, World


def fleet_of(*engines: str, **update: Any) -> World:
    """Engines that are open at version 0, at second 10."""
    world = World(update=update).add(*engines).run(10)
    assert all(engine.runs == 0 for engine in world.watch.engines.values())
    world.story()
    return world


def but(wrong: Callable[[StepCommand], bool], outcome: Outcome) -> Callable[[StepCommand], Outcome]:
    """Every step is done in a second, but some."""
    return lambda do: outcome if wrong(do) else Outcome()

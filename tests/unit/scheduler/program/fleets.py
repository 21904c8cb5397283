"""Fleets and their changes, for the tests of updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduler.program.events import StepCommand
from tests.unit.scheduler.program.world import Answer, World


def fleet_of(*engines: str, **update: Any) -> World:
    """Engines that are open at version 0, at second 10."""
    world = World(update=update).add(*engines).run(10)
    assert all(engine.runs == 0 for engine in world.watch.engines.values())
    world.story()
    return world


def but(wrong: Callable[[StepCommand], bool], answer: Answer) -> Callable[[StepCommand], Answer]:
    """Every step is done in a second, but some."""
    return lambda do: answer if wrong(do) else Answer()

"""The timeline of a simulated run, in the form of a real one's (`scheduler.timeline`). Its seconds are simulated."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from scheduler.simulate.scenario import Scenario
from scheduler.simulate.world import Policy, World
from scheduler.timeline.intervals import Interval, Kind, Step, Timeline, stretches
from scheduler.timeline.page import write


def draw(scenario: Scenario, policy: Policy, seed: int, folder: Path) -> dict[str, str]:
    """Runs the policy, and writes the page and the picture into the folder. Raises SimulationError."""
    return write(timeline(scenario, policy, seed), folder, f"{scenario.name}, {policy.name} (simulated)")


def timeline(scenario: Scenario, policy: Policy, seed: int) -> Timeline:
    """One run. Nodes are engines, and `trainer` is all GPUs that only train. Raises SimulationError."""
    world = World(scenario, policy, scenario.workload(seed))
    world.meter.changes = []
    world.run()
    steps = tuple(Step(buffer, end) for buffer, end in enumerate(world.meter.ends))
    shared = {host.name for host in world.hosts if host.shared}
    nodes = [host.name for host in world.hosts] + (["trainer"] if world.layout.train else [])
    changes = _by_node(world.meter.changes, nodes)
    intervals: list[Interval] = []
    for node in nodes:
        intervals += stretches(node, changes[node], 0.0, world.now, steps)
    trains = frozenset(shared | ({"trainer"} if world.layout.train else set()))
    return Timeline(0.0, world.now, tuple(intervals), steps, trains)


def _by_node(changes: list[tuple[float, str, str]], nodes: list[str]) -> dict[str, list[tuple[float, Kind]]]:
    """Each node's own changes; while it is the trainer's (`lent`), the trainer's."""
    found: dict[str, list[tuple[float, Kind]]] = {node: [] for node in nodes}
    lent: dict[str, None] = {}
    trainer: Kind = "idle"
    for at, node, role in changes:
        if node == "trainer":
            trainer = cast(Kind, role)
            for name in [*lent, *(["trainer"] if "trainer" in found else [])]:
                found[name].append((at, trainer))
        elif role == "lent":
            lent[node] = None
            found[node].append((at, trainer))
        elif role != "over":
            lent.pop(node, None)
            found[node].append((at, cast(Kind, role)))
    return found

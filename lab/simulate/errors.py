"""Errors of a simulation, for its caller."""

from __future__ import annotations


class SimulationError(Exception):
    """The root: the message names what to change."""


class ScenarioError(SimulationError):
    """A scenario, a coefficient or a recorded workload is not what it should be."""


class Stalled(SimulationError):
    """The simulation has no more events, and the last batch was not trained: a policy waits for ever."""

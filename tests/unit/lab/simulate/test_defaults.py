"""The simulated policy is what the gateway runs by default."""

from __future__ import annotations

from pathlib import Path

from gateway.config.settings import Settings
from gateway.control.program_settings import placement_settings, program_settings
from lab.simulate.combined import MODEL, Combined
from scheduler.policies.lending import LendingSettings
from scheduler.program.placement import PlacementSettings
from tests.unit.lab.simulate.scenarios import scenario


def test_the_gateway_and_the_simulator_have_the_programs_defaults() -> None:
    settings = Settings.parse({"models": {"demo": {"path": Path("model")}}})
    assert PlacementSettings.of(placement_settings(settings)) == PlacementSettings()
    lending = program_settings(settings, {})["lending"]
    assert LendingSettings(**lending) == LendingSettings(), "of weights without bytes"
    simulated = Combined().settings(scenario())
    assert simulated["lending"] == {}
    assert simulated["models"][MODEL]["placement"].keys() == {"engine"}, "only the engines' speed is given"

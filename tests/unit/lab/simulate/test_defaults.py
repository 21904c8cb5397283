"""The simulated policy is what the gateway runs by default."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gateway.config.settings import Settings
from gateway.control.program_settings import placement_settings
from lab.simulate.combined import MODEL, Combined
from scheduler.policies.lending import LendingSettings
from scheduler.program.placement import PlacementSettings
from tests.unit.lab.simulate.scenarios import scenario


def test_the_gateway_the_simulator_and_the_program_have_one_set_of_defaults() -> None:
    settings = Settings.parse({"models": {"demo": {"path": Path("model")}}})
    gateway = PlacementSettings.of(placement_settings(settings))
    assert gateway == PlacementSettings()
    assert LendingSettings(**settings.lending.model_dump()) == LendingSettings()
    found = Combined()._settings(scenario())
    simulated = PlacementSettings.of(found["models"][MODEL]["placement"])
    assert replace(simulated, engine=gateway.engine) == gateway, (
        "but for the engines, whose speed is simulated"
    )
    assert LendingSettings(**found["lending"]) == LendingSettings()

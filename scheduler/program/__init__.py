"""The control program as reactors: for each model the life of its engines, the updates of their weights and the placement of its
calls; and the lending of nodes.

`build` makes the program from settings in JSON form, so that a recording alone can be replayed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from scheduler.policies.lending import LendingSettings
from scheduler.program.fleet import Fleet, FleetSettings
from scheduler.program.lending import Lending
from scheduler.program.placement import Placement, PlacementSettings
from scheduler.program.update import UpdateSettings, WeightUpdate
from scheduler.reactor import Program

CONTROL = "control"


class ControlProgram(Program):
    """The program, and its reactors by model."""

    state_packages = ("scheduler.program", "scheduler.policies")

    def __init__(self, settings: dict[str, Any]) -> None:
        """Build the reactors of `settings`: {"models": {NAME: {"fleet": fields of FleetSettings, "update": of UpdateSettings,
        "placement": see `PlacementSettings.of`}}, "lending": fields of LendingSettings}. Missing fields have their defaults.

        A trained model also has "ledger", which readers of a recording use.
        """
        models: dict[str, Any] = settings.get("models") or {"model": {}}
        slugs = _slugs(models)
        self.fleets = {
            name: Fleet(f"fleet_{slug}", FleetSettings(**models[name].get("fleet", {})))
            for name, slug in slugs.items()
        }
        self.updates = {
            name: WeightUpdate(f"update_{slug}", UpdateSettings(**models[name].get("update", {})))
            for name, slug in slugs.items()
        }
        self.placements = {
            name: Placement(f"placement_{slug}", _placement(models[name])) for name, slug in slugs.items()
        }
        self.lending = Lending("lending", LendingSettings(**settings.get("lending", {})), slugs)
        super().__init__(
            CONTROL,
            [
                *self.fleets.values(),
                *self.updates.values(),
                *self.placements.values(),
                self.lending,
            ],
        )
        for name, fleet in self.fleets.items():
            update = self.updates[name]
            self.connect(fleet.launched, update.launched)
            self.connect(fleet.unavailable, update.unavailable)
            self.connect(update.failed, fleet.failed, after=0)
            self.connect(update.target, fleet.target, after=0)
            self.connect(update.opened, fleet.opened, after=0)
            self.connect(update.ended, fleet.ended, after=0)
            self.connect(fleet.verdict, update.verdict)
            placement = self.placements[name]
            self.connect(update.target, placement.target)
            self.connect(fleet.unavailable, placement.unavailable)
            self.connect(fleet.verdict, placement.verdict)
            self.connect(placement.pull, update.pull, after=0)
            self.connect(fleet.unavailable, self.lending.unavailable[name])
            self.connect(fleet.asleep, self.lending.asleep[name])
            self.connect(update.opened, self.lending.opened[name])
            self.connect(self.lending.wanted, fleet.wanted, after=0)
        self.seal()

    def facts(self) -> Iterator[tuple[str | None, object]]:
        """Yield what readers of a recording need of the present state, as the events that report it, each with its model."""
        yield from ((None, fact) for fact in self.lending.facts())
        for name, placement in self.placements.items():
            steps = (*self.fleets[name].steps(), *self.updates[name].steps())
            yield from ((name, fact) for fact in (*placement.facts(), *steps))


def _placement(model: dict[str, Any]) -> PlacementSettings:
    update = model.get("update", {})
    settings = PlacementSettings.of({"pull": update.get("order") == "pull", **model.get("placement", {})})
    if update.get("mode") != "adapter":
        return settings
    # An engine loses nothing by a pull, so none is too busy for one.
    return replace(settings, sync=replace(settings.sync, running_below=sys.maxsize))


def _slugs(names: Iterable[str]) -> dict[str, str]:
    """Return identifiers for names, each different."""
    found: dict[str, str] = {}
    for name in names:
        slug = re.sub(r"\W", "_", name)
        while slug in found.values():
            slug += "_"
        found[name] = slug
    return found


PROGRAMS: dict[str, Callable[[dict[str, Any]], Program]] = {CONTROL: ControlProgram}

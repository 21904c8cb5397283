"""Every policy by name: the baselines, and headgate's own, with the scenario's split of the GPUs and with a planned one."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.simulate.baselines import BASELINES
from scheduler.simulate.combined import Combined
from scheduler.simulate.planned import Planned
from scheduler.simulate.world import Policy

OWN = Combined.name
PLANNED = Planned.name
POLICIES: dict[str, Callable[[], Policy]] = {**BASELINES, OWN: Combined, PLANNED: Planned}

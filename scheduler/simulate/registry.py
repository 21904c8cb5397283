"""Every policy by name: the baselines, and headgate's own."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.simulate.baselines import BASELINES
from scheduler.simulate.combined import Combined
from scheduler.simulate.policy import Policy

OWN = Combined.name
POLICIES: dict[str, Callable[[], Policy]] = {**BASELINES, OWN: Combined}

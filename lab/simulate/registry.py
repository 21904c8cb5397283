"""Every policy by name: the baselines as their sources have them, the same with other knobs of their sources, and headgate's
own, with the scenario's split of the GPUs and with a planned one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lab.simulate.baselines import BASELINES
from lab.simulate.baselines.staleflow import StaleFlow
from lab.simulate.baselines.verl_async import VerlAsync
from lab.simulate.combined import Combined
from lab.simulate.planned import Planned
from lab.simulate.world import Policy

OWN = Combined.name
PLANNED = Planned.name
RIVALS: dict[str, Callable[[], Policy]] = {
    **BASELINES,
    "verl_async_0.1": partial(VerlAsync, 0.1),
    "verl_async_0.3": partial(VerlAsync, 0.3),
    "verl_async_0.5": partial(VerlAsync, 0.5),
    "staleflow_throughput": partial(StaleFlow, "throughput"),
    "staleflow_cache": partial(StaleFlow, "cache"),
    "staleflow_queue": partial(StaleFlow, "queue"),
}
"""The baselines, and those with other knobs: verl's thresholds and StaleFlow's triggers of a pull."""
POLICIES: dict[str, Callable[[], Policy]] = {**RIVALS, OWN: Combined, PLANNED: Planned}

"""Steps of training next to the engine, through the gateway: rates, seconds by part, and updates that streams cross."""

from __future__ import annotations

import asyncio

from bench.gpu import figures
from bench.gpu.checks.place import Figures, Place, require
from bench.gpu.training import train

_STEPS, _DRY_STEPS = 5, 2


def measure(place: Place) -> Figures:
    """Return the figures of `bench.gpu.figures.next_to_engine`, and of the updates."""
    steps = _DRY_STEPS if place.dry else _STEPS
    run = asyncio.run(
        train(place.workload, place.model(), place.folder, place.engine, device=place.device, steps=steps)
    )
    peak = figures.peak_of(place.gpu)
    found = figures.next_to_engine(place.workload.config, run.steps, peak)
    found["updates"] = figures.updates(run.updates)
    live, versions = found["updates"]["live"], found["updates"]["versions"]
    return require(live == versions, f"{versions - live} of {versions} versions are not live", found)

"""The gateway's settings in the form in which the control program, and its recordings, have them. Pure.

A deadline that the settings leave out follows from the bytes of the weights, so that what misses it is stuck and not slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.config.settings import Settings

_LOAD_S = 120.0
_WAKE_S = 60.0
_LENDING_S = 30.0
_SLOWEST = 1e8
"""Bytes/s of the slowest disk or network for which the default deadline of a load is enough."""
_SLOWEST_SEEN = 1e7
"""The same for engines whose reading the gateway sees, so that it ends a stuck load itself (`gateway.updates.load_watch`)."""
_SLOWEST_COPY = 1e9
"""Bytes/s of the slowest copy between an accelerator and the host, pinning of the memory included: a sleep at level 1, and the
wake after it."""


def program_settings(settings: Settings, weight_bytes: Mapping[str, int]) -> dict[str, Any]:
    """Return the control program's settings. `weight_bytes`: of each model that it controls."""
    lending = settings.lending.model_dump() | {"deadline_s": lending_deadline_s(settings, weight_bytes)}
    models = {
        model: _model_settings(settings, model, size, lending["deadline_s"])
        for model, size in weight_bytes.items()
    }
    return {"models": models, "lending": lending}


def lending_deadline_s(settings: Settings, weight_bytes: Mapping[str, int]) -> float:
    """Return the longest that a trainer waits for its node (`[lending] deadline_s`)."""
    largest = max(weight_bytes.values(), default=0)
    found = settings.lending.deadline_s
    return _LENDING_S + 2 * largest / _SLOWEST_COPY if found is None else found


def _model_settings(settings: Settings, model: str, size: int, lending_s: float) -> dict[str, Any]:
    engine, update = settings.engine_of(model), settings.update
    is_seen = engine.launch != "external" and engine.transport != "collective"
    slowest = _SLOWEST_SEEN if is_seen else _SLOWEST
    load_s = _LOAD_S + size / slowest if update.load_s is None else update.load_s
    return {
        **({"ledger": {}} if settings.models[model].train else {}),
        "fleet": {
            "start_s": engine.start_s + 5.0,
            "drain_s": update.pause_timeout_s,
            "sleep_s": lending_s / 2,
            "wake_s": _WAKE_S + size / _SLOWEST_COPY + load_s,
            "max_restarts": engine.max_restarts,
            "window_s": engine.restart_window_s,
            "insist": engine.launch == "external" and settings.cluster.url is not None,
        },
        "update": {
            "mode": "adapter" if engine.transport == "lora" else update.mode,
            "order": update.order,
            "hold_s": update.pause_timeout_s,
            **({"finish_s": update.pause_timeout_s} if update.canary else {}),
            "load_s": load_s,
        },
        "placement": placement_settings(settings),
    }


def placement_settings(settings: Settings) -> dict[str, Any]:
    """Return the fields of `PlacementSettings` (`scheduler.program.placement`) that `[routing]` sets."""
    routing, pulls = settings.routing, settings.update.order == "pull"
    return {
        "choice": {"rule": routing.rule},
        "engine": routing.engine_prior.model_dump(),
        "migration": {"on": pulls if routing.migrate is None else routing.migrate},
        "zone": settings.cluster.zone,
        "distance_s": routing.distance_s if settings.cluster.zone else 0.0,
    }

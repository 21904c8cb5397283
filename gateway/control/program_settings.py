"""The gateway's settings in the form in which the control program, and its recordings, have them. Pure."""

from __future__ import annotations

from typing import Any

from gateway.config.settings import Settings

_LOAD_S = 120.0
_SLOWEST = 1e8
"""Bytes/s of the slowest disk or network for which the default deadline of a load is enough."""


def program_settings(settings: Settings, model: str, weight_bytes: int) -> dict[str, Any]:
    """Return the control program's settings for a model, whose weights have `weight_bytes`."""
    engine, update = settings.engine_of(model), settings.update
    trained = settings.models[model].train
    return {
        **({"ledger": {}} if trained else {}),
        "fleet": {
            "start_s": engine.start_s + 5.0,
            "drain_s": update.pause_timeout_s,
            "sleep_s": settings.lending.deadline_s / 2,
            "max_restarts": engine.max_restarts,
            "window_s": engine.restart_window_s,
            "insist": engine.launch == "external" and settings.cluster.url is not None,
        },
        "update": {
            "mode": "adapter" if engine.transport == "lora" else update.mode,
            "order": update.order,
            "hold_s": update.pause_timeout_s,
            **({"finish_s": update.pause_timeout_s} if update.canary else {}),
            "load_s": _LOAD_S + weight_bytes / _SLOWEST if update.load_s is None else update.load_s,
        },
        "placement": placement_settings(settings),
    }


def placement_settings(settings: Settings) -> dict[str, Any]:
    """Return the control program's settings for routing; what they leave out has the program's defaults."""
    routing, pulls = settings.routing, settings.update.order == "pull"
    return {
        "choice": {"rule": routing.rule},
        "engine": routing.engine_prior.model_dump(),
        "migration": {"on": pulls if routing.migrate is None else routing.migrate},
    }

"""The admin routes that a gateway and the viewer of recorded runs both serve, in one list, so that neither lacks a new one."""

from __future__ import annotations

from gateway.api.admin import (
    batches,
    canary,
    engines,
    episode_pages,
    episode_tokens,
    episodes,
    events,
    nodes,
    staleness,
    weights,
)

SHOWN = (
    episode_pages,  # a list of episodes comes before one episode: `histogram` is not an id
    episode_tokens,
    episodes,
    batches,
    staleness,
    weights,
    canary,
    engines,
    nodes,
    events,
)
"""Modules, each with its `router`."""

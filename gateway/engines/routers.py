"""The routers of mixtures of experts whose routes are recorded: `[models.NAME] router_replay`."""

from __future__ import annotations

import json

from gateway.config import ModelSettings
from gateway.config.settings import ConfigError
from headgate.routes import RouterShape, dtype_of, router_shape


def routers_of(name: str, model: ModelSettings) -> RouterShape | None:
    """Return the routers of a model whose routes are to be recorded; None if none are. Raise ConfigError if it has none."""
    if not model.router_replay or model.path is None:
        return None
    where = f"[models.{name}] router_replay = true"
    try:
        found = router_shape(json.loads((model.path / "config.json").read_bytes()))
        if found is not None:
            dtype_of(found.experts)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{where}: the routers of {model.path} cannot be read: {error}") from error
    if found is None:
        raise ConfigError(
            f"{where}: {model.path} is not a mixture of experts, so tokens have no routes: leave it out"
        )
    return found

"""Environments that others wrote, played against an episode's URL: `gateway episodes run --env KIND:NAME`.

`base` is the seam, one file each are the adapters, and `worker` is the process in which an environment lives: any Python that
has the environment's package, headgate's own or another (`--env-python`). So this package imports the
standard library, an HTTP client, and the package that it adapts.
"""

from __future__ import annotations

import importlib
from typing import Any

from headgate.environments.base import Environment

KINDS = {
    "verifiers": "headgate.environments.verifiers:VerifiersEnvironment",
    "inspect": "headgate.environments.inspect:InspectEnvironment",
    "gym": "headgate.environments.gym:GymEnvironment",
    "reasoning-gym": "headgate.environments.reasoning_gym:ReasoningGymEnvironment",
    "fake": "headgate.environments.fake:FakeEnvironment",
}


def parse(environment: str) -> tuple[str, str]:
    """Return the kind and the name in `KIND:NAME`. Raise ValueError."""
    kind, _, name = environment.partition(":")
    if kind not in KINDS or not name:
        raise ValueError(
            f"an environment is KIND:NAME, with one of {', '.join(KINDS)} as its kind, not {environment!r}"
        )
    return kind, name


def load(environment: str, args: dict[str, Any]) -> Environment:
    """Return the environment `KIND:NAME`, with arguments of its own. Raise ValueError, and what its package raises."""
    kind, name = parse(environment)
    module, _, attribute = KINDS[kind].partition(":")
    loaded: Environment = getattr(importlib.import_module(module), attribute)(name, **args)
    return loaded

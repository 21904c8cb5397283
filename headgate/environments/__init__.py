"""Environments that others wrote, played against an episode's URL: `gateway episodes run --env KIND:NAME`.

`base` is the seam, one file each are the adapters, and `worker` is the process in which an environment lives: any Python that
has the environment's package, headgate's own or another (`--env-python`). So this package imports the
standard library, an HTTP client, and the package that it adapts.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from headgate.environments.base import Environment
from headgate.extras import install_command

KINDS = {
    "verifiers": "headgate.environments.verifiers:VerifiersEnvironment",
    "inspect": "headgate.environments.inspect:InspectEnvironment",
    "gym": "headgate.environments.gym:GymEnvironment",
    "reasoning-gym": "headgate.environments.reasoning_gym:ReasoningGymEnvironment",
    "fake": "headgate.environments.fake:FakeEnvironment",
}


class NotInstalled(Exception):
    """The package of a kind of environment is missing in this Python."""


def parse(environment: str) -> tuple[str, str]:
    """Return the kind and the name in `KIND:NAME`. Raise ValueError."""
    kind, _, name = environment.partition(":")
    if kind not in KINDS or not name:
        raise ValueError(
            f"an environment is KIND:NAME, with one of {', '.join(KINDS)} as its kind, not {environment!r}"
        )
    return kind, name


def load(environment: str, args: dict[str, Any]) -> Environment:
    """Return the environment `KIND:NAME`. Raise ValueError, NotInstalled, and what its package raises."""
    kind, name = parse(environment)
    module, _, attribute = KINDS[kind].partition(":")
    try:
        adapter = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise NotInstalled(
            f"{kind} needs {error.name}, which {sys.executable} does not have: {install_command(kind)}, or name the Python that"
            " has it with --env-python ([rollout] env_python)"
        ) from error
    loaded: Environment = getattr(adapter, attribute)(name, **args)
    return loaded

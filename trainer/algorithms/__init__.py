"""The algorithms by name. To add one: write its file, and add its line to `REGISTRY`; or name a class of your own.

An algorithm of your own is a class of settings with a method `create`, named `package.module:Name` in `[algorithm] type`. Its
module is imported when the settings are read, from the folder in which the trainer starts, too.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from trainer.algorithms.a3po import A3poSettings
from trainer.algorithms.base import Algorithm, AlgorithmSettings, Loss, Rewards, State, StepTokens, TokenBatch
from trainer.algorithms.cispo import CispoSettings
from trainer.algorithms.clip_cov import ClipCovSettings
from trainer.algorithms.dapo import DapoSettings
from trainer.algorithms.dppo import DppoSettings
from trainer.algorithms.dr_grpo import DrGrpoSettings
from trainer.algorithms.gdpo import GdpoSettings
from trainer.algorithms.gmpo import GmpoSettings
from trainer.algorithms.grpo import GrpoSettings
from trainer.algorithms.gspo import GspoSettings
from trainer.algorithms.kl_cov import KlCovSettings
from trainer.algorithms.m2po import M2poSettings
from trainer.algorithms.opo import OpoSettings
from trainer.algorithms.ppo import PpoSettings
from trainer.algorithms.reinforce import ReinforceSettings
from trainer.algorithms.reinforce_plus_plus import ReinforcePlusPlusSettings
from trainer.algorithms.rloo import RlooSettings
from trainer.algorithms.sapo import SapoSettings

REGISTRY: dict[str, type[AlgorithmSettings]] = {
    "a3po": A3poSettings,
    "cispo": CispoSettings,
    "clip_cov": ClipCovSettings,
    "dapo": DapoSettings,
    "dppo": DppoSettings,
    "dr_grpo": DrGrpoSettings,
    "gdpo": GdpoSettings,
    "gmpo": GmpoSettings,
    "grpo": GrpoSettings,
    "gspo": GspoSettings,
    "kl_cov": KlCovSettings,
    "m2po": M2poSettings,
    "opo": OpoSettings,
    "ppo": PpoSettings,
    "reinforce": ReinforceSettings,
    "reinforce++": ReinforcePlusPlusSettings,
    "rloo": RlooSettings,
    "sapo": SapoSettings,
}
"""The value of `[algorithm] type`."""

__all__ = [
    "REGISTRY",
    "Algorithm",
    "AlgorithmSettings",
    "Loss",
    "Rewards",
    "State",
    "StepTokens",
    "TokenBatch",
    "learns_from_equal",
    "settings_of",
]


def settings_of(name: str) -> type[AlgorithmSettings]:
    """Return the settings' class of `[algorithm] type`. Raise ValueError with a reason for a name that leads to none."""
    if name in REGISTRY:
        return REGISTRY[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} is none of {', '.join(sorted(REGISTRY))}, and no package.module:Name")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an import runs the module
        raise ValueError(f"{name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, AlgorithmSettings)):
        raise ValueError(f"{name!r} is not a subclass of trainer.algorithms.AlgorithmSettings")
    if found.create is AlgorithmSettings.create:
        raise ValueError(f"{name!r} has no method `create` that returns an algorithm")
    return found


def learns_from_equal(algorithm: Algorithm) -> bool:
    """Return whether a group whose rewards are equal, as those of an episode alone, teaches anything; not where only the
    episodes of a group are compared, by their rewards."""
    if algorithm.needs_components:
        return True
    one, none = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    groups = [Rewards(reward, one, none) for reward in torch.eye(2, dtype=torch.float64)[0].split(1)]
    return any(bool(advantages.any()) for advantages in algorithm.advantages(groups, {}))

"""The algorithms by name. To add one: write its file, and add its line to `REGISTRY`."""

from __future__ import annotations

from typing import Any

import torch

from trainer.algorithms.base import Algorithm, AlgorithmSettings, Loss, TokenBatch
from trainer.algorithms.cispo import CispoSettings, cispo
from trainer.algorithms.dapo import DapoSettings, dapo
from trainer.algorithms.dr_grpo import DrGrpoSettings, dr_grpo
from trainer.algorithms.grpo import GrpoSettings, grpo
from trainer.algorithms.gspo import GspoSettings, gspo
from trainer.algorithms.ppo import PpoSettings, ppo
from trainer.algorithms.reinforce_plus_plus import ReinforcePlusPlusSettings, reinforce_plus_plus
from trainer.algorithms.rloo import RlooSettings, rloo
from trainer.algorithms.sft import Likelihood, LikelihoodSettings

REGISTRY: dict[str, tuple[type[AlgorithmSettings], Any]] = {
    "cispo": (CispoSettings, cispo),
    "dapo": (DapoSettings, dapo),
    "dr_grpo": (DrGrpoSettings, dr_grpo),
    "grpo": (GrpoSettings, grpo),
    "gspo": (GspoSettings, gspo),
    "ppo": (PpoSettings, ppo),
    "reinforce++": (ReinforcePlusPlusSettings, reinforce_plus_plus),
    "rloo": (RlooSettings, rloo),
}
"""The value of `[algorithm] type`: the settings' type, and what is called with them to make the algorithm."""

__all__ = ["REGISTRY", "Algorithm", "AlgorithmSettings", "Loss", "TokenBatch", "create", "learns_from_equal"]


def create(settings: AlgorithmSettings) -> Algorithm:
    """Return the algorithm that `settings` describe."""
    if isinstance(settings, LikelihoodSettings):
        return Likelihood()
    algorithm: Algorithm = REGISTRY[settings.type][1](settings)
    return algorithm


def learns_from_equal(algorithm: Algorithm) -> bool:
    """Return whether a group whose rewards are equal, as those of an episode alone, teaches anything; not where only the
    episodes of a group are compared."""
    rewards = torch.eye(2, dtype=torch.float64)[0]
    return any(bool(advantages.any()) for advantages in algorithm.advantages(rewards.split(1)))

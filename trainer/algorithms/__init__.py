"""The algorithms by name. To add one: write its file, and add its line to `REGISTRY`."""

from __future__ import annotations

from typing import Any

import torch

from trainer.algorithms.base import Algorithm, AlgorithmSettings, Loss, TokenBatch
from trainer.algorithms.grpo import Grpo, GrpoSettings

REGISTRY: dict[str, tuple[type[AlgorithmSettings], Any]] = {
    "grpo": (GrpoSettings, Grpo),
}
"""The value of `[algorithm] type`: the settings' type, and what is called with them to make the algorithm."""

__all__ = ["REGISTRY", "Algorithm", "AlgorithmSettings", "Loss", "TokenBatch", "create", "learns_from_one"]


def create(settings: AlgorithmSettings) -> Algorithm:
    """The algorithm that `settings` describe."""
    algorithm: Algorithm = REGISTRY[settings.type][1](settings)
    return algorithm


def learns_from_one(algorithm: Algorithm) -> bool:
    """Returns whether an episode alone in its group teaches anything; it does not where a group's episodes are compared."""
    return bool(algorithm.advantages([torch.ones(1, dtype=torch.float64)])[0].any())

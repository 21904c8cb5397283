"""CISPO: importance weights are cut, and no token loses its gradient.

Source: MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention" (2025).
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import Field

from trainer.algorithms.base import TokenBatch
from trainer.algorithms.baselines import group_mean
from trainer.algorithms.policy_gradient import (
    Importance,
    PolicyGradient,
    PolicySettings,
    sampler_ratios,
)
from trainer.corrections import tis_token


class CispoSettings(PolicySettings):
    """`[algorithm]` with `type = "cispo"`."""

    type: Literal["cispo"] = "cispo"
    importance_cap: float = Field(5.0, gt=0)
    """The largest importance weight of a token, 1 + epsilon_high in the paper; `inf` truncates nothing."""

    def create(self) -> PolicyGradient:
        """Use (reward - mean) / standard deviation of the group; each token's ratio, cut; the mean over tokens."""

        def importance(batch: TokenBatch) -> Importance:
            weight = tis_token(sampler_ratios(batch), 0.0, self.importance_cap)
            return Importance(weight, torch.zeros_like(weight, dtype=torch.bool))

        return PolicyGradient(self, baseline=partial(group_mean, normalize_std=True), importance=importance)

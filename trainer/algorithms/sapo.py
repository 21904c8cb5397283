"""SAPO: a smooth gate in place of the clip, so that a token far from the sampler counts less and less.

Source: Gao et al., "Soft Adaptive Policy Optimization" (arXiv 2511.20347), equations 5 and 6.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import Field

from trainer.algorithms.base import TokenBatch
from trainer.algorithms.baselines import group_mean
from trainer.algorithms.policy_gradient import Importance, PolicyGradient, PolicySettings, sampler_ratios


class SapoSettings(PolicySettings):
    """`[algorithm]` with `type = "sapo"`."""

    type: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(1.0, gt=0, le=100)
    """The gate's temperature for tokens with a positive advantage: the larger, the faster a token's weight falls with its ratio's
    distance from 1."""
    temperature_negative: float = Field(1.05, gt=0, le=100)
    """The same for other tokens; larger than the positive one, since their gradients raise every other token's probability."""

    def create(self) -> PolicyGradient:
        """Weigh each token by its ratio times the gate's slope, which is 1 at a ratio of 1; the mean over episodes."""

        def importance(batch: TokenBatch) -> Importance:
            ratio = sampler_ratios(batch).by_token()
            temperature = torch.full_like(ratio, self.temperature_negative)
            temperature[batch.advantages > 0] = self.temperature_positive
            gate = torch.sigmoid(temperature * (ratio - 1))
            return Importance(4 * gate * (1 - gate) * ratio, torch.zeros_like(ratio, dtype=torch.bool))

        return PolicyGradient(
            self,
            baseline=partial(group_mean, normalize_std=True),
            importance=importance,
            average="sequence",
        )

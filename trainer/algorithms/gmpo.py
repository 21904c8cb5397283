"""GMPO: an episode counts by the geometric mean of its clipped ratios, which an outlier moves less than the arithmetic one.

Source: Zhao et al., "Geometric-Mean Policy Optimization" (arXiv 2507.20673), equation 4.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import Field

from trainer.algorithms.base import TokenBatch
from trainer.algorithms.baselines import group_mean
from trainer.algorithms.policy_gradient import Importance, PolicyGradient, PolicySettings, sampler_ratios
from trainer.corrections import Ratios


class GmpoSettings(PolicySettings):
    """`[algorithm]` with `type = "gmpo"`."""

    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(0.4, ge=0)
    """A token with a negative advantage gives no gradient once its log-ratio is below -clip_low; `inf` turns it off."""
    clip_high: float = Field(0.4, ge=0)
    """A token with a positive advantage gives no gradient once its log-ratio is above clip_high; `inf` turns it off."""

    def create(self) -> PolicyGradient:
        """Weigh an episode's tokens by the geometric mean of their clipped ratios; the mean over episodes."""

        def importance(batch: TokenBatch) -> Importance:
            logs = sampler_ratios(batch).logs
            above = (batch.advantages > 0) & (logs > self.clip_high)
            below = (batch.advantages < 0) & (logs < -self.clip_low)
            cut = torch.where(above, self.clip_high, torch.where(below, -self.clip_low, logs))
            weight = Ratios(cut, batch.sequences, batch.episodes).geometric()
            return Importance(weight, above | below)

        return PolicyGradient(
            self,
            baseline=partial(group_mean, normalize_std=True),
            importance=importance,
            average="sequence",
            sequence_ratios=True,
        )

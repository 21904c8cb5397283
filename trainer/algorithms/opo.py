"""OPO: the baseline with the least variance, in which an episode counts as often as it has tokens.

Source: Hao et al., "On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585). The paper trains on-policy, without a clip or
an importance weight; stale tokens have a weight here (`correction`).
"""

from __future__ import annotations

from typing import Literal

import torch

from trainer.algorithms.base import TokenBatch
from trainer.algorithms.baselines import length_weighted
from trainer.algorithms.policy_gradient import (
    CorrectionSettings,
    Importance,
    PolicyGradient,
    PolicySettings,
    corrected,
    corrects_sequences,
    sampler_ratios,
)


class OpoSettings(PolicySettings, CorrectionSettings):
    """`[algorithm]` with `type = "opo"`."""

    type: Literal["opo"] = "opo"

    def create(self) -> PolicyGradient:
        """Use reward - length-weighted mean of the group; the mean over tokens. Nothing is clipped."""

        def importance(batch: TokenBatch) -> Importance:
            weight = corrected(sampler_ratios(batch), self)
            return Importance(weight, torch.zeros_like(weight, dtype=torch.bool))

        return PolicyGradient(
            self,
            baseline=length_weighted,
            importance=importance,
            sequence_ratios=corrects_sequences(self),
        )

"""RLOO: REINFORCE, with the mean reward of the group's other episodes as the baseline.

Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs"
(2024).
"""

from __future__ import annotations

from typing import Literal

import torch

from trainer.algorithms.base import TokenBatch
from trainer.algorithms.baselines import leave_one_out
from trainer.algorithms.policy_gradient import (
    CorrectionSettings,
    Importance,
    PolicyGradient,
    PolicySettings,
    corrected,
    corrects_sequences,
    sampler_ratios,
)


class RlooSettings(PolicySettings, CorrectionSettings):
    """`[algorithm]` with `type = "rloo"`."""

    type: Literal["rloo"] = "rloo"

    def create(self) -> PolicyGradient:
        """Treat the episode as one action: average the sums of the episodes' tokens. Nothing is clipped."""

        def importance(batch: TokenBatch) -> Importance:
            weight = corrected(sampler_ratios(batch), self)
            return Importance(weight, torch.zeros_like(weight, dtype=torch.bool))

        return PolicyGradient(
            self,
            baseline=leave_one_out,
            importance=importance,
            average="constant",
            sequence_ratios=corrects_sequences(self),
        )

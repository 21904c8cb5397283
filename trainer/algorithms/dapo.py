"""DAPO: GRPO with a higher bound of the clip from above, and the mean over all tokens.

Source: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025). The paper's other two parts are not
needed here: groups with equal rewards have no gradient under any algorithm, and the reward decides what overlong episodes cost.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field

from trainer.algorithms.baselines import group_mean
from trainer.algorithms.policy_gradient import ClippedSettings, PolicyGradient, clipped, corrects_sequences


class DapoSettings(ClippedSettings):
    """`[algorithm]` with `type = "dapo"`."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(0.28, ge=0)
    """A token with a positive advantage gives no gradient once its ratio is above 1 + clip_high; `inf` turns it off."""

    def create(self) -> PolicyGradient:
        """Use (reward - mean) / standard deviation of the group; importance weight and clip by token; the mean over tokens."""
        return PolicyGradient(
            self,
            baseline=partial(group_mean, normalize_std=True),
            importance=clipped(self),
            sequence_ratios=corrects_sequences(self),
        )

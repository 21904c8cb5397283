"""GSPO: the importance ratio and the clip are of the episode, as the reward is.

Source: Zheng et al., "Group Sequence Policy Optimization" (2025).
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field

from trainer.algorithms.base import TokenBatch
from trainer.algorithms.baselines import group_mean
from trainer.algorithms.policy_gradient import (
    Importance,
    PolicyGradient,
    PolicySettings,
    sampler_ratios,
)
from trainer.corrections import outside_trust_region


class GspoSettings(PolicySettings):
    """`[algorithm]` with `type = "gspo"`."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, ge=0, le=1)
    """An episode with a negative advantage gives no gradient once the geometric mean of its ratios is below 1 - clip_low; 1 turns
    it off."""
    clip_high: float = Field(4e-4, ge=0)
    """An episode with a positive advantage gives no gradient once the geometric mean of its ratios is above 1 + clip_high; `inf`
    turns it off."""

    def create(self) -> PolicyGradient:
        """Use advantages from the group; the geometric mean of an episode's ratios weighs its tokens; the mean over episodes."""

        def importance(batch: TokenBatch) -> Importance:
            ratio = sampler_ratios(batch).geometric()
            outside = outside_trust_region(ratio, batch.advantages, self.clip_low, self.clip_high)
            return Importance(ratio, outside)

        return PolicyGradient(
            self,
            baseline=partial(group_mean, normalize_std=True),
            importance=importance,
            average="sequence",
            sequence_ratios=True,
        )

"""Dr. GRPO: GRPO without its two biases, the division by the standard deviation and the one by the episode's length.

Source: Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective" (2025).
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field

from trainer.algorithms.baselines import group_mean
from trainer.algorithms.policy_gradient import ClippedSettings, PolicyGradient, clipped, corrects_sequences


class DrGrpoSettings(ClippedSettings):
    """`[algorithm]` with `type = "dr_grpo"`."""

    type: Literal["dr_grpo"] = "dr_grpo"
    length: int = Field(ge=1, le=2**24)
    """The number by which the sum over an episode's tokens is divided, whatever its length: the most tokens that an episode may
    sample (`generate_max_length` in the paper's code). The mean over all episodes of the batch follows, as there."""

    def create(self) -> PolicyGradient:
        """Use reward - mean of the group; divide each episode's sum by a constant."""
        return PolicyGradient(
            self,
            baseline=partial(group_mean, normalize_std=False),
            importance=clipped(self),
            average="constant",
            length=self.length,
            sequence_ratios=corrects_sequences(self),
        )

"""GRPO: the other episodes of a group are the baseline.

Sources: Shao et al., "DeepSeekMath" (2024) for the group baseline; Liu et al., "Understanding R1-Zero-Like Training" (2025) for
leaving the division by the standard deviation out; Yu et al., "DAPO" (2025) for the asymmetric clip.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field

from trainer.algorithms.baselines import group_mean
from trainer.algorithms.policy_gradient import ClippedSettings, PolicyGradient, clipped, corrects_sequences


class GrpoSettings(ClippedSettings):
    """`[algorithm]` with `type = "grpo"`."""

    type: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    clip_high: float = Field(0.28, ge=0)
    """A token with a positive advantage gives no gradient once its ratio is above 1 + clip_high; `inf` turns it off."""
    average: Literal["token", "sequence"] = "token"
    """The mean over the tokens of the batch that may be trained (`token`), or over its episodes, of their tokens' means
    (`sequence`, as in the paper). Groups without advantage count."""

    def create(self) -> PolicyGradient:
        """Use advantages from the group; importance weight and clip by token."""
        return PolicyGradient(
            self,
            baseline=partial(group_mean, normalize_std=self.normalize_std),
            importance=clipped(self),
            average=self.average,
            sequence_ratios=corrects_sequences(self),
        )

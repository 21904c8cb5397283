"""REINFORCE++: PPO's clip without a critic, and advantages normalized over the whole batch.

Source: Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization" (2025). The
paper takes a k1 KL term off the rewards: `kl = "k1"` and a `kl_coef`. Here every episode counts once in the mean and the
deviation, and each of its tokens pays the divergence of all of them; in the paper every token counts, and pays that of the tokens
from it on, which is less noisy.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from trainer.algorithms.baselines import whitened
from trainer.algorithms.policy_gradient import ClippedSettings, PolicyGradient, clipped, corrects_sequences


class ReinforcePlusPlusSettings(ClippedSettings):
    """`[algorithm]` with `type = "reinforce++"`."""

    type: Literal["reinforce++"] = "reinforce++"
    group_baseline: bool = False
    """Take the mean of its group off each reward first (the paper's REINFORCE++ with baseline)."""

    def create(self) -> PolicyGradient:
        """Use (reward - mean) / standard deviation of the batch; importance weight and clip by token; the mean over tokens."""
        return PolicyGradient(
            self,
            baseline=partial(whitened, group_baseline=self.group_baseline),
            importance=clipped(self),
            scope="batch",
            sequence_ratios=corrects_sequences(self),
        )

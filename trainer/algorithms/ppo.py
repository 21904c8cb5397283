"""PPO's clipped objective with several optimizer steps on one batch, and the group as the baseline instead of a critic.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017); Hilton et al., "Batch size-invariance for policy
optimization" (2021) for the decoupled objective; Fu et al., "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for
Language Reasoning" (2025) for its use where samples are stale.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field

from trainer.algorithms.base import TokenBatch
from trainer.algorithms.baselines import group_mean
from trainer.algorithms.policy_gradient import (
    ClippedSettings,
    Importance,
    PolicyGradient,
    corrected,
    corrects_sequences,
    sampler_ratios,
)
from trainer.corrections import Ratios, outside_trust_region


class PpoSettings(ClippedSettings):
    """`[algorithm]` with `type = "ppo"`."""

    type: Literal["ppo"] = "ppo"
    normalize_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    minibatches: int = Field(4, ge=1, le=64)
    """Parts into which the groups of a batch are cut, each of them one optimizer step. The clip bounds how far the steps before
    have moved the policy, so with 1 it does nothing."""
    epochs: int = Field(1, ge=1, le=64)
    """Passes over a batch, each of `minibatches` optimizer steps; metrics are of the first."""

    def create(self) -> PolicyGradient:
        """Correct staleness by the importance weight, proximal over sampler; clip the ratio trained over proximal."""

        def importance(batch: TokenBatch) -> Importance:
            proximal = batch.logprobs if batch.proximal is None else batch.proximal
            moved = Ratios((batch.logprobs - proximal).detach(), batch.sequences, batch.episodes).by_token()
            outside = outside_trust_region(moved, batch.advantages, self.clip_low, self.clip_high)
            return Importance(corrected(sampler_ratios(batch), self) * moved, outside)

        return PolicyGradient(
            self,
            baseline=partial(group_mean, normalize_std=self.normalize_std),
            importance=importance,
            minibatches=self.minibatches,
            epochs=self.epochs,
            sequence_ratios=corrects_sequences(self),
        )

"""A-3PO: PPO's decoupled objective, whose proximal policy is read off the staleness instead of computed.

The sampler is s versions old, and the trained policy one version further than the policy at the beginning of the batch, whose
log-probability is taken to be the share s / (s + 1) of the way from the one's to the other's: no pass computes it.
Source: "A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy Approximation" (arXiv 2512.06547).
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
)
from trainer.corrections import Ratios, outside_trust_region


class A3poSettings(ClippedSettings):
    """`[algorithm]` with `type = "a3po"`."""

    type: Literal["a3po"] = "a3po"
    minibatches: int = Field(1, ge=1, le=64)
    """Parts into which the groups of a batch are cut, each of them one optimizer step."""
    epochs: int = Field(1, ge=1, le=64)
    """Passes over a batch."""

    def create(self) -> PolicyGradient:
        """Correct staleness by the importance weight, proximal over sampler; clip the ratio trained over proximal."""

        def importance(batch: TokenBatch) -> Importance:
            gaps = batch.logprobs.detach() - batch.recorded
            share = (batch.staleness / (batch.staleness + 1)).to(gaps.dtype)
            moved = Ratios((1 - share) * gaps, batch.sequences, batch.episodes).by_token()
            outside = outside_trust_region(moved, batch.advantages, self.clip_low, self.clip_high)
            stale = Ratios(share * gaps, batch.sequences, batch.episodes)
            return Importance(corrected(stale, self) * moved, outside)

        return PolicyGradient(
            self,
            baseline=partial(group_mean, normalize_std=True),
            importance=importance,
            minibatches=self.minibatches,
            epochs=self.epochs,
            sequence_ratios=corrects_sequences(self),
            computes_proximal=False,
        )

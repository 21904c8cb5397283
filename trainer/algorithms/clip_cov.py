"""Clip-Cov: some of the tokens that lower the entropy give no gradient.

The entropy falls with the covariance of log-probability and advantage. Of the tokens whose part of it is between `low` and
`high`, as many as `share` of the step's tokens are drawn, and left out; the others are clipped as in PPO. The draw is by a hash
of the recorded log-probability: the same in every micro-batch, pass and rank, and tokens of equal log-probability are drawn
together.
Source: Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv 2505.22617), with the
defaults and the clip of its code.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from trainer.algorithms.base import StepTokens, TokenBatch
from trainer.algorithms.baselines import group_mean
from trainer.algorithms.kl_cov import covariance, mean_values
from trainer.algorithms.policy_gradient import (
    ClippedSettings,
    Importance,
    PolicyGradient,
    clipped,
    corrects_sequences,
)

CUTOFF = "hash_cutoff"
"""The greatest hash whose tokens are left out; -1: none is."""
_FACTOR, _BITS = -0x61C8864680B583EB, 30
"""2^64 over the golden ratio, as int64; the bits of a hash."""


class ClipCovSettings(ClippedSettings):
    """`[algorithm]` with `type = "clip_cov"`."""

    type: Literal["clip_cov"] = "clip_cov"
    share: float = Field(0.0002, gt=0, le=1)
    """The share of a step's tokens that are left out, at least one, unless fewer are between `low` and `high`."""
    low: float = Field(1.0, ge=0)
    """The least part of the covariance of a token that may be left out: log-probability times advantage, each minus its mean."""
    high: float = Field(5.0, ge=0)
    """The greatest one."""
    minibatches: int = Field(4, ge=1, le=64)
    """Parts into which the groups of a batch are cut, each of them one optimizer step."""
    epochs: int = Field(1, ge=1, le=64)
    """Passes over a batch."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError("low is above high: no token is between them")
        return self

    def create(self) -> PolicyGradient:
        """Clip as PPO does, and leave out some tokens of large covariance; the mean over tokens."""

        def candidates(products: Tensor) -> Tensor:
            return (products >= self.low) & (products <= self.high)

        def measure(step: StepTokens) -> dict[str, float]:
            means = mean_values(step)
            chosen = candidates(covariance(step.logprobs, step.advantages, means))
            hashes = _hash(step.recorded[chosen]).sort().values
            most = min(len(hashes), max(1, int(self.share * len(chosen))))
            return {**means, CUTOFF: float(hashes[most - 1]) if most else -1.0}

        def importance(batch: TokenBatch) -> Importance:
            found = clipped(self)(batch)
            left_out = candidates(covariance(batch.logprobs.detach(), batch.advantages, batch.statistics))
            left_out &= _hash(batch.recorded) <= batch.statistics[CUTOFF]
            return Importance(found.weight, found.outside | left_out)

        return PolicyGradient(
            self,
            baseline=partial(group_mean, normalize_std=True),
            importance=importance,
            minibatches=self.minibatches,
            epochs=self.epochs,
            sequence_ratios=corrects_sequences(self),
            measure=measure,
            computes_proximal=False,
        )


def _hash(recorded: Tensor) -> Tensor:
    """Return a number from 0 to 2^30 - 1 for each log-probability, int64, the same for float32 and float64."""
    mixed = recorded.float().double().view(torch.int64) * _FACTOR
    return (mixed >> (64 - _BITS)) & (2**_BITS - 1)

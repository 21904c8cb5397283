"""KL-Cov: the tokens that lower the entropy most are held near the sampler.

The entropy falls with the covariance of log-probability and advantage. The `share` of a step's tokens with the largest product of
both, each minus its mean over the step, pay `coef` times the distance of their log-probability from the sampler's. On the first
optimizer step on fresh tokens that distance is 0 and has no gradient: it acts with several steps on a batch, or on stale tokens.
Source: Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv 2505.22617), with the
absolute difference of its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.base import StepTokens, TokenBatch
from trainer.algorithms.baselines import group_mean
from trainer.algorithms.policy_gradient import (
    CorrectionSettings,
    Importance,
    PolicyGradient,
    PolicySettings,
    corrected,
    corrects_sequences,
)
from trainer.corrections import Ratios

CUTOFF = "covariance_cutoff"
"""The least covariance whose tokens are held."""


class KlCovSettings(PolicySettings, CorrectionSettings):
    """`[algorithm]` with `type = "kl_cov"`."""

    type: Literal["kl_cov"] = "kl_cov"
    share: float = Field(0.002, gt=0, le=1)
    """The share of a step's tokens that are held, at least one; tokens of equal covariance are held together."""
    coef: float = Field(1.0, ge=0, le=1000)
    """The weight of the distance of a held token's log-probability from the sampler's."""
    minibatches: int = Field(4, ge=1, le=64)
    """Parts into which the groups of a batch are cut, each of them one optimizer step."""
    epochs: int = Field(1, ge=1, le=64)
    """Passes over a batch."""

    def create(self) -> PolicyGradient:
        """Weigh tokens by their ratios, without a clip, and hold the step's largest covariances; the mean over tokens."""

        def measure(step: StepTokens) -> dict[str, float]:
            means = mean_values(step)
            if not len(step.logprobs):
                return {**means, CUTOFF: 0.0}
            products = covariance(step.logprobs, step.advantages, means).sort(descending=True).values
            held = max(1, int(self.share * len(products)))
            # Between two tokens, so that the rounding of another pass selects the same ones.
            cutoff = float(products[held - 1 : held + 1].mean())
            return {**means, CUTOFF: cutoff}

        def importance(batch: TokenBatch) -> Importance:
            ratios = Ratios(batch.logprobs.detach() - batch.recorded, batch.sequences, batch.episodes)
            products = covariance(batch.logprobs.detach(), batch.advantages, batch.statistics)
            pull = self.coef * (products >= batch.statistics[CUTOFF]).to(batch.recorded.dtype)
            return Importance(corrected(ratios, self), torch.zeros_like(pull, dtype=torch.bool), pull)

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


_LOGPROB, _ADVANTAGE = "mean_logprob", "mean_advantage"


def mean_values(step: StepTokens) -> dict[str, float]:
    """Return the means over a step by which `covariance` centers."""
    columns = {_LOGPROB: step.logprobs, _ADVANTAGE: step.advantages}
    # Sorted, so that the means do not depend on the order of the tokens.
    return {
        name: float(values.double().sort().values.mean()) if len(values) else 0.0
        for name, values in columns.items()
    }


def covariance(logprobs: Tensor, advantages: Tensor, means: Mapping[str, float]) -> Tensor:
    """Return each token's part of the covariance, float64, shape (tokens,)."""
    return (logprobs.double() - means[_LOGPROB]) * (advantages.double() - means[_ADVANTAGE])

"""DPPO: the trust region bounds how far a token's probability moved, and not its ratio.

A ratio is large for every rare token, and small where a likely one loses most of its probability. `tv` bounds the total
variation, `kl` the KL divergence of the two outcomes "this token" and "any other".
Source: Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879), its binary approximations;
prime-rl's default loss has `tv` with 0.2.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.base import TokenBatch
from trainer.algorithms.baselines import group_mean
from trainer.algorithms.policy_gradient import (
    CorrectionSettings,
    Importance,
    PolicyGradient,
    PolicySettings,
    corrected,
    corrects_sequences,
    sampler_ratios,
)

_TINY = 1e-12
"""Keeps the logarithm of a probability of 0 finite."""


class DppoSettings(PolicySettings, CorrectionSettings):
    """`[algorithm]` with `type = "dppo"`."""

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """What is bounded: the difference of the token's probabilities (`tv`), or the KL divergence of the two outcomes (`kl`)."""
    bound_low: float = Field(0.2, ge=0)
    """A token with a negative advantage gives no gradient once it became less likely and the divergence is above this bound."""
    bound_high: float = Field(0.2, ge=0)
    """A token with a positive advantage gives no gradient once it became likelier and the divergence is above this bound."""

    def create(self) -> PolicyGradient:
        """Mask tokens whose probability moved too far in the advantage's direction; the mean over tokens."""
        measure = _total_variation if self.divergence == "tv" else _binary_kl

        def importance(batch: TokenBatch) -> Importance:
            ratios = sampler_ratios(batch)
            sampler = batch.recorded.exp()
            policy = (batch.recorded + ratios.logs).exp()
            moved = measure(sampler, policy)
            above = (batch.advantages > 0) & (policy > sampler) & (moved > self.bound_high)
            below = (batch.advantages < 0) & (policy < sampler) & (moved > self.bound_low)
            return Importance(corrected(ratios, self), above | below)

        return PolicyGradient(
            self,
            baseline=partial(group_mean, normalize_std=True),
            importance=importance,
            sequence_ratios=corrects_sequences(self),
        )


def _total_variation(sampler: Tensor, policy: Tensor) -> Tensor:
    return (policy - sampler).abs()


def _binary_kl(sampler: Tensor, policy: Tensor) -> Tensor:
    """Return KL(sampler || policy) of the outcomes "this token" and "any other", nats; the shape of `sampler`."""
    others, left = (1 - sampler).clamp(min=_TINY), (1 - policy).clamp(min=_TINY)
    return sampler * torch.log(sampler / policy.clamp(min=_TINY)) + others * torch.log(others / left)

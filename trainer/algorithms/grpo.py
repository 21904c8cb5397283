"""GRPO: the other episodes of a group are the baseline.

Sources: Shao et al., "DeepSeekMath" (2024) for the group baseline; Liu et al., "Understanding R1-Zero-Like Training" (2025) for
leaving the division by the standard deviation out; `trainer.corrections.ratio` for the off-policy correction and the clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from scheduler.policies.rewards import all_equal
from trainer.algorithms.base import AlgorithmSettings, Loss, TokenBatch
from trainer.corrections.ratio import (
    importance_ratio,
    outside_trust_region,
    truncated_importance_weight,
)


class GrpoSettings(AlgorithmSettings):
    """`[algorithm]` with `type = "grpo"`."""

    type: Literal["grpo"] = "grpo"
    normalise_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """A token with a negative advantage gives no gradient once its ratio is below 1 - clip_low; 1 turns it off."""
    clip_high: float = Field(0.28, ge=0)
    """A token with a positive advantage gives no gradient once its ratio is above 1 + clip_high; `inf` turns it off."""
    importance_cap: float = Field(2.0, gt=0)
    """The largest importance weight of a token; `inf` truncates nothing. Where it is above 1 + clip_high, it acts on negative
    advantages and on the KL term alone: a token with a positive one is clipped before."""
    importance_floor: float = Field(0.0, ge=0, le=1)
    """The smallest importance weight of a token; 0 raises none. Where it is below 1 - clip_low, it acts on positive advantages
    and on the KL term alone: a token with a negative one is clipped before."""
    kl_coef: float = Field(0.0, ge=0, le=10)
    """Weight of the KL divergence to the initial weights; 0 loads no reference."""
    kl: Literal["k3", "k1"] = "k3"
    """The form of the KL divergence. `k3` is a term of the loss: its estimate by token, times the importance weight. `k1` is
    taken off the reward, before advantages: the sum of recorded - reference over an episode's trained tokens, times `kl_coef`."""
    entropy_coef: float = Field(0.0, ge=0, le=10)
    """Weight of an entropy bonus."""
    normaliser: Literal["token", "sequence"] = "token"
    """The mean over trained tokens (`token`), or the mean over episodes of their tokens' means (`sequence`)."""


class Grpo:
    """One optimizer step per batch: the policy gradient with a truncated importance weight and an asymmetric clip."""

    def __init__(self, settings: GrpoSettings) -> None:
        self.settings = settings

    @property
    def needs_reference(self) -> bool:
        """True with a KL term in the loss."""
        return self.settings.kl_coef > 0 and self.settings.kl == "k3"

    @property
    def reward_kl(self) -> float:
        """`kl_coef` with `kl = "k1"`."""
        return self.settings.kl_coef if self.settings.kl == "k1" else 0.0

    @property
    def needs_entropy(self) -> bool:
        """True with an entropy bonus."""
        return self.settings.entropy_coef > 0

    @property
    def trains_without_advantage(self) -> bool:
        """True with a KL term in the loss, or an entropy bonus."""
        return self.needs_reference or self.needs_entropy

    @property
    def sequence_mean(self) -> bool:
        """True with `normaliser = "sequence"`."""
        return self.settings.normaliser == "sequence"

    @property
    def scope(self) -> Literal["group"]:
        """The group."""
        return "group"

    @property
    def whole_episodes(self) -> bool:
        """False."""
        return False

    @property
    def minibatches(self) -> int:
        """One."""
        return 1

    def normaliser(self, tokens: int, episodes: int) -> float:
        """Trained tokens, or episodes with `normaliser = "sequence"`."""
        return float(max(1, episodes if self.sequence_mean else tokens))

    def advantages(self, rewards: Sequence[Tensor]) -> list[Tensor]:
        """The advantages of each group."""
        return [self._of_group(group) for group in rewards]

    def _of_group(self, rewards: Tensor) -> Tensor:
        """reward - mean, over the (population) standard deviation unless that is off; zeros where all rewards are equal, but for
        rounding."""
        centred = rewards - rewards.mean()
        if all_equal(rewards.tolist()):
            return torch.zeros_like(rewards)
        return centred / rewards.std(correction=0) if self.settings.normalise_std else centred

    def loss(self, batch: TokenBatch) -> Loss:
        """-w A log p per token, where w is the importance weight, or 0 outside the trust region."""
        settings = self.settings
        ratio = importance_ratio(batch.logprobs, batch.recorded)
        weight = truncated_importance_weight(ratio, settings.importance_cap, settings.importance_floor)
        clipped = outside_trust_region(ratio, batch.advantages, settings.clip_low, settings.clip_high)
        policy = -torch.where(clipped, 0.0, weight) * batch.advantages * batch.logprobs
        per_token = policy
        if self.needs_entropy:
            per_token = per_token - settings.entropy_coef * batch.entropy
        reference_kl = torch.zeros_like(batch.recorded)
        if batch.reference is not None:
            reference_kl = _k3(batch.logprobs.detach(), batch.reference)
            per_token = per_token + settings.kl_coef * _weighted_kl(batch, weight, reference_kl)
        total = (per_token * batch.weights).sum()
        values = {
            "policy_loss": policy,
            "entropy": batch.entropy,
            "clip_fraction": clipped,
            "importance_weight": weight,
            "kl_recorded_k1": batch.recorded - batch.logprobs,
            "kl_recorded_k3": _k3(batch.recorded, batch.logprobs.detach()),
            "kl_reference_k3": reference_kl,
        }
        return Loss(total, {name: _sum(value) for name, value in values.items()})


def _weighted_kl(batch: TokenBatch, weight: Tensor, k3: Tensor) -> Tensor:
    """The k3 estimate times the importance weight; its gradient is that of the product, weight * (logprobs - reference).

    The ratio is part of the gradient (TRL: `use_bias_correction_kl`), for the tokens are not the trained policy's. Written out,
    for autograd would add exp(reference - logprobs) to its own negative, which cancels badly where the two differ much.
    """
    assert batch.reference is not None
    value = batch.logprobs.detach()
    return weight * (k3 + (value - batch.reference) * (batch.logprobs - value))


def _k3(sampler: Tensor, other: Tensor) -> Tensor:
    """The k3 estimate of KL(sampler || other) per token: never negative, unbiased for tokens of `sampler`.

    The exponent is clamped to +-20. Source: Schulman, "Approximating KL Divergence" (2020).
    """
    gap = (other - sampler).clamp(-20.0, 20.0)
    return gap.exp() - gap - 1.0


def _sum(values: Tensor) -> Tensor:
    return values.detach().to(torch.float64).sum()

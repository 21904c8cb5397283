"""Corrections for tokens that the trained policy would have sampled differently, by name.

The sampler and the trainer differ in two ways: by staleness (the sampler's weights are older) and by arithmetic (another engine,
other kernels, other dtypes). Both are one ratio, trainer over sampler. A correction weighs tokens, a mask leaves them out; both
are pure functions of the ratios. To add one: write its function, and add its line to `CORRECTIONS` or `MASKS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LIMIT = 20.0
"""Bound of a log-ratio: far outside of what any correction accepts, and small enough that no ratio is infinite."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """The log-ratios of the trained tokens of a micro-batch, and ratios made of them; all of shape (trained,), no gradient."""

    logs: Tensor
    """log-probability under the trained policy minus that under the sampling policy; float32 or float64, nats."""
    sequences: Tensor
    """int64: the token's episode, from 0 to `episodes` - 1."""
    episodes: int

    def by_token(self) -> Tensor:
        """Return the ratio of each token."""
        return self.logs.clamp(-LIMIT, LIMIT).exp()

    def by_sequence(self) -> Tensor:
        """Return the ratio of the token's whole episode: the product over its trained tokens."""
        return self._sums().clamp(-LIMIT, LIMIT).exp()[self.sequences].to(self.logs.dtype)

    def geometric(self) -> Tensor:
        """Return the geometric mean of the ratios of the token's episode, which does not depend on its length."""
        counts = torch.bincount(self.sequences, minlength=self.episodes).clamp(min=1)
        means = (self._sums() / counts).clamp(-LIMIT, LIMIT)
        return means.exp()[self.sequences].to(self.logs.dtype)

    def _sums(self) -> Tensor:
        """Return the sum of the log-ratios of each episode, shape (episodes,), float64."""
        logs = self.logs.double()
        return logs.new_zeros(self.episodes).index_add(0, self.sequences, logs)


def outside_trust_region(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return true where the PPO clip removes the gradient: the ratio is past a bound in the advantage's direction.

    Bool, the shape of `ratio`. Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017); separate bounds:
    Yu et al., "DAPO" (2025). `clip_low` 1 and `clip_high` infinity do not clip.
    """
    above = (advantages > 0) & (ratio > 1.0 + clip_high)
    below = (advantages < 0) & (ratio < 1.0 - clip_low)
    return above | below


def none(ratios: Ratios, low: float, high: float) -> Tensor:
    """Return weight 1 for every token, shape (trained,): samples count as if the trained policy had drawn them."""
    return torch.ones_like(ratios.logs)


def tis_token(ratios: Ratios, low: float, high: float) -> Tensor:
    """Return each token's ratio, clamped to [low, high]; shape (trained,). 0 and infinity do not clamp.

    Sources: Ionides, "Truncated Importance Sampling" (2008); between an inference engine and a trainer: Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    return ratios.by_token().clamp(low, high)


def tis_sequence(ratios: Ratios, low: float, high: float) -> Tensor:
    """Return the ratio of the token's whole episode, clamped to [low, high]; shape (trained,).

    Unbiased except for the bounds, while the ratio by token neglects that the context was sampled by another policy too; its
    variance grows with the length. Source: Liu, Li et al., "When Speed Kills Stability" (2025).
    """
    return ratios.by_sequence().clamp(low, high)


def icepop(ratios: Ratios, low: float, high: float) -> Tensor:
    """Return each token's ratio inside [low, high], and 0 outside; shape (trained,). The paper's bounds are 0.5 and 5.

    Source: Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model" (2025).
    """
    ratio = ratios.by_token()
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def mask_token(ratios: Ratios, low: float, high: float) -> Tensor:
    """Return true where the token's ratio is in [low, high]; bool, shape (trained,).

    Source: the token-level rejection of Liu, Li et al., "When Speed Kills Stability" (2025).
    """
    return _within(ratios.by_token(), low, high)


def mask_sequence(ratios: Ratios, low: float, high: float) -> Tensor:
    """Return true where the ratio of the token's whole episode is in [low, high]; bool, shape (trained,).

    The longer the episode, the farther from 1 is the product of small differences: suitable for short episodes.
    Source: the sequence-level rejection (masked importance sampling) of Liu, Li et al., "When Speed Kills Stability" (2025).
    """
    return _within(ratios.by_sequence(), low, high)


def mask_geometric(ratios: Ratios, low: float, high: float) -> Tensor:
    """Return true where the geometric mean of the ratios of the token's episode is in [low, high]; bool, shape (trained,).

    It does not depend on the length, so bounds are close to 1, such as 0.99 and 1.01.
    Source: the geometric rejection of Liu, Li et al., "When Speed Kills Stability" (2025).
    """
    return _within(ratios.geometric(), low, high)


def _within(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio >= low) & (ratio <= high)


@dataclass(frozen=True, slots=True)
class Correction:
    """One correction or mask."""

    apply: Callable[[Ratios, float, float], Tensor]
    """Called with the ratios and the least and greatest ratio; returns shape (trained,)."""
    whole_episodes: bool = False
    """True if it needs all trained tokens of an episode in one micro-batch."""


CORRECTIONS = {
    "none": Correction(none),
    "tis_token": Correction(tis_token),
    "tis_sequence": Correction(tis_sequence, whole_episodes=True),
    "icepop": Correction(icepop),
}
"""The value of `[algorithm] correction`."""

MASKS = {
    "mask_token": Correction(mask_token),
    "mask_sequence": Correction(mask_sequence, whole_episodes=True),
    "mask_geometric": Correction(mask_geometric, whole_episodes=True),
}
"""The key of `[algorithm]` that turns the mask on by giving its bounds."""

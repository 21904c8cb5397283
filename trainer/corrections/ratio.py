"""Ratios of two policies: how much likelier one makes what the other sampled, by token and by episode.

The sampler and the trainer differ twice over: by staleness (the sampler's weights are older) and by arithmetic (another
engine, other kernels, other dtypes). Both are one ratio, trainer over sampler. Pure tensor maths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LIMIT = 20.0
"""Bound of a log-ratio: far outside of what any correction lets through, and small enough that no ratio is infinite."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """The log-ratios of the trained tokens of a micro-batch, and ratios made of them; all of shape (trained,), no gradient."""

    logs: Tensor
    """log-probability under the policy that is trained - that under the policy that sampled; float32 or float64, nats."""
    sequences: Tensor
    """int64: the token's episode, from 0 to `episodes` - 1."""
    episodes: int

    def by_token(self) -> Tensor:
        """The ratio of each token."""
        return self.logs.clamp(-LIMIT, LIMIT).exp()

    def by_sequence(self) -> Tensor:
        """The ratio of the token's whole episode: the product over its trained tokens."""
        return self._sums().clamp(-LIMIT, LIMIT).exp()[self.sequences].to(self.logs.dtype)

    def geometric(self) -> Tensor:
        """The geometric mean of the ratios of the token's episode, which does not grow or vanish with its length."""
        counts = torch.bincount(self.sequences, minlength=self.episodes).clamp(min=1)
        means = (self._sums() / counts).clamp(-LIMIT, LIMIT)
        return means.exp()[self.sequences].to(self.logs.dtype)

    def _sums(self) -> Tensor:
        """The sum of the log-ratios of each episode, shape (episodes,), float64."""
        logs = self.logs.double()
        return logs.new_zeros(self.episodes).index_add(0, self.sequences, logs)


def outside_trust_region(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """True where the PPO clip removes the gradient: the ratio has already moved past a bound in the advantage's direction.

    Bool, the shape of `ratio`. Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017); separate bounds:
    Yu et al., "DAPO" (2025). `clip_low` 1 and `clip_high` infinity are no bounds.
    """
    above = (advantages > 0) & (ratio > 1.0 + clip_high)
    below = (advantages < 0) & (ratio < 1.0 - clip_low)
    return above | below

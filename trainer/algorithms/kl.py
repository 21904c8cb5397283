"""Estimates of the KL divergence between two policies, by token. Pure tensor math.

Source: Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

from torch import Tensor

LIMIT = 20.0
"""Bound of the exponent, so that no estimate is infinite."""


def k3(sampler: Tensor, other: Tensor) -> Tensor:
    """Return the k3 estimate of KL(sampler || other), any shape, nats: never negative, unbiased for tokens of `sampler`."""
    gap = (other - sampler).clamp(-LIMIT, LIMIT)
    return gap.exp() - gap - 1.0


def weighted_k3(logprobs: Tensor, reference: Tensor, weight: Tensor) -> Tensor:
    """Return k3 of KL(logprobs || reference) times `weight`, with the gradient weight * (logprobs - reference).

    Any shape, nats. With the token's ratio to the sampler as `weight`, the expectation of this gradient over the sampler's tokens
    is that of the divergence (TRL: `use_bias_correction_kl`). Written out, for autograd would add exp(reference - logprobs) to
    its own negative, which cancels badly where the two differ much.
    """
    value = logprobs.detach()
    return weight * (k3(value, reference) + (value - reference) * (logprobs - value))

"""Importance correction: what to do about tokens that the policy being trained would have sampled differently.

The sampler and the trainer differ twice over: by staleness (the sampler's weights are older) and by arithmetic (another
engine, other kernels, other dtypes). Both are one ratio, trainer over sampler, per token. Pure tensor maths.
"""

from __future__ import annotations

from torch import Tensor


def importance_ratio(logprobs: Tensor, recorded: Tensor) -> Tensor:
    """exp(trainer - recorded) per token, detached; any shape, in nats.

    The exponent is clamped to +-20, far outside of what any cap lets through, so that no ratio is infinite.
    """
    return (logprobs.detach() - recorded).clamp(-20.0, 20.0).exp()


def truncated_importance_weight(ratio: Tensor, cap: float, floor: float = 0.0) -> Tensor:
    """The ratio between `floor` and `cap`: truncated importance sampling; 0 and infinity are no bounds.

    Source: Ionides, "Truncated Importance Sampling" (2008); per token between an inference engine and a trainer: Yao et al.,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    return ratio.clamp(floor, cap)


def outside_trust_region(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where the PPO clip takes the gradient away: the ratio has already moved past a bound in the advantage's direction.

    Bool, the shape of `ratio`. Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017); separate bounds:
    Yu et al., "DAPO" (2025). `clip_low` 1 and `clip_high` infinity are no bounds.
    """
    above = (advantages > 0) & (ratio > 1.0 + clip_high)
    below = (advantages < 0) & (ratio < 1.0 - clip_low)
    return above | below

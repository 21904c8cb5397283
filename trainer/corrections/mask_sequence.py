"""Leaves out whole episodes by the product of their tokens' ratios."""

from __future__ import annotations

from torch import Tensor

from trainer.corrections.ratio import Ratios


def mask_sequence(ratios: Ratios, low: float, high: float) -> Tensor:
    """True where the ratio of the token's whole episode is in [low, high]; bool, shape (trained,).

    The longer the episode, the farther from 1 is the product of small differences: fit for short episodes.
    Source: the sequence-level rejection (masked importance sampling) of Liu, Li et al., "When Speed Kills Stability" (2025).
    """
    ratio = ratios.by_sequence()
    return (ratio >= low) & (ratio <= high)

"""Leaves out whole episodes by the geometric mean of their tokens' ratios."""

from __future__ import annotations

from torch import Tensor

from trainer.corrections.ratio import Ratios


def mask_geometric(ratios: Ratios, low: float, high: float) -> Tensor:
    """True where the geometric mean of the ratios of the token's episode is in [low, high]; bool, shape (trained,).

    It does not depend on the length, so bounds are close to 1, as 0.99 and 1.01.
    Source: the geometric rejection of Liu, Li et al., "When Speed Kills Stability" (2025).
    """
    ratio = ratios.geometric()
    return (ratio >= low) & (ratio <= high)

"""Leaves out tokens by their own ratio."""

from __future__ import annotations

from torch import Tensor

from trainer.corrections.ratio import Ratios


def mask_token(ratios: Ratios, low: float, high: float) -> Tensor:
    """True where the token's ratio is in [low, high]; bool, shape (trained,).

    Source: the token-level rejection of Liu, Li et al., "When Speed Kills Stability" (2025).
    """
    ratio = ratios.by_token()
    return (ratio >= low) & (ratio <= high)

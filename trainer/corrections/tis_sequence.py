"""Truncated importance sampling by episode."""

from __future__ import annotations

from torch import Tensor

from trainer.corrections.ratio import Ratios


def tis_sequence(ratios: Ratios, low: float, high: float) -> Tensor:
    """The ratio of the token's whole episode, cut to [low, high]; shape (trained,).

    Unbiased except for the bounds, where the ratio by token neglects that the context was sampled by another policy too; its
    variance grows with the length. Source: Liu, Li et al., "When Speed Kills Stability" (2025).
    """
    return ratios.by_sequence().clamp(low, high)

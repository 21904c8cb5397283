"""Truncated importance sampling by token."""

from __future__ import annotations

from torch import Tensor

from trainer.corrections.ratio import Ratios


def tis_token(ratios: Ratios, low: float, high: float) -> Tensor:
    """Each token's ratio, cut to [low, high]; shape (trained,). 0 and infinity are no bounds.

    Sources: Ionides, "Truncated Importance Sampling" (2008); between an inference engine and a trainer: Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    return ratios.by_token().clamp(low, high)

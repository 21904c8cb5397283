"""IcePop: importance weights by token, without the tokens on which engine and trainer differ much."""

from __future__ import annotations

from torch import Tensor

from trainer.corrections.ratio import Ratios


def icepop(ratios: Ratios, low: float, high: float) -> Tensor:
    """Each token's ratio inside [low, high], and 0 outside; shape (trained,). The paper's bounds are 0.5 and 5.

    Source: Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model" (2025).
    """
    ratio = ratios.by_token()
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)

"""No correction."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.corrections.ratio import Ratios


def none(ratios: Ratios, low: float, high: float) -> Tensor:
    """Weight 1 for every token, shape (trained,): samples count as if the trained policy had drawn them; no bound acts."""
    return torch.ones_like(ratios.logs)

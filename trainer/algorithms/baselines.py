"""Advantages from rewards: what an episode's reward is compared with.

Each function takes one tensor of rewards for each group, shape (episodes,), float64, and returns advantages of the same shapes.
Invariants: equal rewards (`headgate.rewards`) give exactly 0; finite rewards, however small or large, give no NaN.
Pure tensor math.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headgate.rewards import all_equal

EPSILON = 1e-4
"""Added to a standard deviation that divides, as in TRL (verl adds 1e-6). Rewards of size 1 that differ by little more than equal
ones may, 2**-20, so have advantages of at most 0.01: noise does not jump to full size where rewards stop being equal."""


def group_mean(rewards: Sequence[Tensor], *, normalize_std: bool) -> list[Tensor]:
    """Return reward - mean of its group; with `normalize_std`, over the group's (population) standard deviation + EPSILON."""
    return [_standard(group, normalize_std) for group in rewards]


def leave_one_out(rewards: Sequence[Tensor]) -> list[Tensor]:
    """Return reward - mean of the others of its group; 0 for a single episode."""
    return [_standard(group, False) * (len(group) / max(1, len(group) - 1)) for group in rewards]


def whitened(rewards: Sequence[Tensor], *, group_baseline: bool) -> list[Tensor]:
    """Return (reward - mean) over the (population) standard deviation + EPSILON, of the whole batch, each episode counting once.

    With `group_baseline`, the mean of its group is subtracted from each reward first.
    """
    if not rewards:
        return []
    centered = group_mean(rewards, normalize_std=False) if group_baseline else rewards
    return [*_standard(torch.cat([*centered]), True).split([len(group) for group in rewards])]


def _standard(values: Tensor, normalize_std: bool) -> Tensor:
    if all_equal(values.tolist()):
        return torch.zeros_like(values)
    # A power of 2 rounds nothing, and squares of values of size 1 neither vanish nor overflow.
    _, exponent = math.frexp(float(values.abs().max()))
    scale = math.ldexp(1.0, exponent - 1)
    centered = values / scale - (values / scale).mean()
    if not normalize_std:
        return centered * scale
    return centered / (centered.std(correction=0) + EPSILON / scale)

"""Advantages from rewards: what an episode's reward is compared with.

Each function takes the rewards of groups, and the algorithm's state, which some ignore, and returns
a tensor of advantages for each group, shape (episodes,), float64.
Invariants: equal rewards (`headgate.rewards`) give exactly 0; finite rewards, however small or large, give no NaN.
Pure tensor math.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headgate.rewards import all_equal
from trainer.algorithms.base import Rewards, State

EPSILON = 1e-4
"""Added to a standard deviation that divides, as in TRL (verl adds 1e-6). Rewards of size 1 that differ by little more than equal
ones may, 2**-20, so have advantages of at most 0.01: noise does not jump to full size where rewards stop being equal."""


def group_mean(groups: Sequence[Rewards], _: State, *, normalize_std: bool) -> list[Tensor]:
    """Return reward - mean of its group; with `normalize_std`, over the group's (population) standard deviation + EPSILON."""
    return [_standard(group.values, normalize_std) for group in groups]


def length_weighted(groups: Sequence[Rewards], _: State) -> list[Tensor]:
    """Return reward - mean of its group, in which a reward counts as often as it has tokens."""
    return [_minus_weighted_mean(group.values, group.lengths) for group in groups]


def leave_one_out(groups: Sequence[Rewards], state: State) -> list[Tensor]:
    """Return reward - mean of the others of its group; 0 for a single episode."""
    sizes = [len(group.values) for group in groups]
    centered = group_mean(groups, state, normalize_std=False)
    return [each * (size / max(1, size - 1)) for each, size in zip(centered, sizes, strict=True)]


def whitened(groups: Sequence[Rewards], state: State, *, group_baseline: bool) -> list[Tensor]:
    """Return (reward - mean) over the (population) standard deviation + EPSILON, of the whole batch, each episode counting once.

    With `group_baseline`, the mean of its group is subtracted from each reward first.
    """
    if not groups:
        return []
    values = [group.values for group in groups]
    centered = group_mean(groups, state, normalize_std=False) if group_baseline else values
    return [*_standard(torch.cat(centered), True).split([len(each) for each in values])]


def _minus_weighted_mean(values: Tensor, lengths: Tensor) -> Tensor:
    centered = _standard(values, False)
    weights = lengths.to(centered.dtype)
    if not centered.any() or not weights.any():
        return centered
    return centered - (weights * centered).sum() / weights.sum()


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

"""Advantages from rewards: what an episode's reward is compared with.

Each function takes one tensor of rewards for each group, shape (episodes,), and returns advantages of the same shapes. Rewards
that are equal but for rounding give exactly 0. Pure tensor maths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scheduler.policies.rewards import all_equal


def group_mean(rewards: Sequence[Tensor], *, normalise_std: bool) -> list[Tensor]:
    """reward - mean of its group; with `normalise_std`, over the (population) standard deviation of the group."""
    return [_standard(group, normalise_std) for group in rewards]


def leave_one_out(rewards: Sequence[Tensor]) -> list[Tensor]:
    """reward - mean of the others of its group; 0 for an episode alone."""
    return [_standard(group, False) * (len(group) / max(1, len(group) - 1)) for group in rewards]


def whitened(rewards: Sequence[Tensor], *, group_baseline: bool) -> list[Tensor]:
    """(reward - mean) over the (population) standard deviation, both of the whole batch, each episode counting once; with
    `group_baseline`, the mean of its group is taken off each reward first."""
    if not rewards:
        return []
    centred = group_mean(rewards, normalise_std=False) if group_baseline else rewards
    return [*_standard(torch.cat([*centred]), True).split([len(group) for group in rewards])]


def _standard(values: Tensor, normalise_std: bool) -> Tensor:
    if all_equal(values.tolist()):
        return torch.zeros_like(values)
    centred = values - values.mean()
    return centred / values.std(correction=0) if normalise_std else centred

"""GDPO: each component of the reward is normalized in its group by itself, and their sum over the batch.

Normalizing the sum of the rewards gives different combinations of components the same advantage; here a group whose rewards are
equal, but not their components, teaches as well.
Source: Liu et al., "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization" (arXiv
2601.05242).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.base import Rewards, State
from trainer.algorithms.baselines import EPSILON, group_mean
from trainer.algorithms.policy_gradient import ClippedSettings, PolicyGradient, clipped, corrects_sequences


class GdpoSettings(ClippedSettings):
    """`[algorithm]` with `type = "gdpo"`."""

    type: Literal["gdpo"] = "gdpo"
    components: Annotated[dict[str, float], Field(min_length=1)]
    """The components of the reward by name, with their weights, such as `{ correct = 1.0, format = 0.5 }`. Every episode needs
    them; the reward itself does not count."""

    def create(self) -> PolicyGradient:
        """Normalize each component in its group, and their weighted sum over the batch; the mean over tokens."""

        def baseline(groups: Sequence[Rewards], state: State) -> list[Tensor]:
            sums = [torch.zeros_like(group.values) for group in groups]
            for name, weight in self.components.items():
                own = [replace(group, values=group.components[name]) for group in groups]
                each = group_mean(own, state, normalize_std=True)
                sums = [total + weight * part for total, part in zip(sums, each, strict=True)]
            # Their mean is 0 in each group, so in the batch.
            deviation = torch.cat(sums).std(correction=0) if sums else 0.0
            return [total / (deviation + EPSILON) for total in sums]

        return PolicyGradient(
            self,
            baseline=baseline,
            importance=clipped(self),
            scope="batch",
            sequence_ratios=corrects_sequences(self),
            needs_components=tuple(self.components),
        )

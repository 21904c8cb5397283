"""REINFORCE with a running baseline: what the mean reward was in earlier steps.

Nothing is compared within a group, so groups of one episode learn without waiting for the whole batch. The baseline is in the
checkpoint.
Sources: Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning" (1992);
the moving average of Ahmadian et al., "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback
in LLMs" (2024), which is over all steps: `horizon = inf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.base import Rewards, State, TokenBatch
from trainer.algorithms.policy_gradient import (
    CorrectionSettings,
    Importance,
    PolicyGradient,
    PolicySettings,
    corrected,
    corrects_sequences,
    sampler_ratios,
)

_MEAN, _STEPS = "mean", "steps"


class ReinforceSettings(PolicySettings, CorrectionSettings):
    """`[algorithm]` with `type = "reinforce"`."""

    type: Literal["reinforce"] = "reinforce"
    horizon: float = Field(20.0, ge=1)
    """Steps that the baseline remembers: the newest mean reward counts 1 / `horizon`, and the same as each other one before that
    many steps. `inf`: all steps count the same."""
    initial: float = 0.0
    """The baseline of the first step."""

    def create(self) -> PolicyGradient:
        """Treat the episode as one action: average the sums of the episodes' tokens. Nothing is clipped."""

        def baseline(groups: Sequence[Rewards], state: State) -> list[Tensor]:
            return [group.values - state.get(_MEAN, self.initial) for group in groups]

        def remember(groups: Sequence[Rewards], state: State) -> State:
            mean, steps = state.get(_MEAN, 0.0), state.get(_STEPS, 0.0) + 1
            found = float(torch.cat([group.values for group in groups]).mean()) if groups else mean
            return {_MEAN: mean + (found - mean) / min(steps, self.horizon), _STEPS: steps}

        def importance(batch: TokenBatch) -> Importance:
            weight = corrected(sampler_ratios(batch), self)
            return Importance(weight, torch.zeros_like(weight, dtype=torch.bool))

        return PolicyGradient(
            self,
            baseline=baseline,
            importance=importance,
            average="constant",
            sequence_ratios=corrects_sequences(self),
            remember=remember,
        )

"""M2PO: the tokens of a step whose log-ratios are largest are left out, until the second moment of the others is bounded.

A few outliers make stale data unstable; the other tokens are kept, whatever their age. Tokens of equal log-ratios are kept or
left out together, so the result does not depend on their order.
Sources: Zheng et al., "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?" (arXiv 2510.01161);
AReaL's form of it, in which the mean is over the tokens that are kept.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import Field

from trainer.algorithms.base import StepTokens, TokenBatch
from trainer.algorithms.baselines import group_mean
from trainer.algorithms.policy_gradient import Importance, PolicyGradient, PolicySettings, sampler_ratios

CUTOFF = "second_moment_cutoff"
"""The largest squared log-ratio that is trained in the step."""


class M2poSettings(PolicySettings):
    """`[algorithm]` with `type = "m2po"`."""

    type: Literal["m2po"] = "m2po"
    second_moment: float = Field(0.04, gt=0)
    """The bound of the mean squared log-ratio of a step's tokens, trained over sampler."""

    def create(self) -> PolicyGradient:
        """Weigh tokens by their ratios, and leave out the step's outliers; the mean over tokens."""

        def measure(step: StepTokens) -> dict[str, float]:
            squares = (step.logprobs - step.recorded).double().square().sort().values
            means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
            rest = squares[int((means <= self.second_moment).sum()) :]
            kept = squares[squares < rest[0]] if len(rest) else squares
            return {CUTOFF: float(kept[-1]) if len(kept) else -1.0}

        def importance(batch: TokenBatch) -> Importance:
            ratios = sampler_ratios(batch)
            return Importance(ratios.by_token(), ratios.logs.square() > batch.statistics[CUTOFF])

        return PolicyGradient(
            self,
            baseline=partial(group_mean, normalize_std=True),
            importance=importance,
            measure=measure,
        )

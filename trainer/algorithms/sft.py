"""Supervised learning: the log-likelihood of every token that is to be learned, whatever an episode earned.

It is not an `[algorithm]` of `trainer run`; `trainer sft` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.base import AlgorithmSettings, Loss, Rewards, State, StepTokens, TokenBatch


class LikelihoodSettings(AlgorithmSettings):
    """No keys."""

    type: Literal["sft"] = "sft"

    def create(self) -> Likelihood:
        """Weigh every token the same."""
        return Likelihood()


class Likelihood:
    """The mean over tokens of -log p."""

    needs_reference = False
    reward_kl = 0.0
    needs_entropy = False
    trains_without_advantage = True
    sequence_mean = False
    scope: Literal["group", "batch"] = "group"
    whole_episodes = False
    minibatches = 1
    epochs = 1
    needs_proximal = False
    needs_statistics = False
    needs_components: Sequence[str] = ()

    def advantages(self, groups: Sequence[Rewards], state: State) -> list[Tensor]:
        """Return 1 for every episode."""
        return [torch.ones_like(group.values) for group in groups]

    def next_state(self, groups: Sequence[Rewards], state: State) -> State:
        """Return nothing."""
        return {}

    def statistics(self, step: StepTokens) -> dict[str, float]:
        """Return nothing."""
        return {}

    def normalizer(self, tokens: int, episodes: int) -> float:
        """Return the trained tokens; at least 1."""
        return float(max(1, tokens))

    def loss(self, batch: TokenBatch) -> Loss:
        """Return the sum of -log p over the tokens."""
        entropy, every = batch.entropy.detach(), torch.ones_like(batch.recorded)
        by_token = {
            "entropy": entropy, "importance_weight": every, "clip_fraction": every == 0, "mask_fraction": every == 0,
        }  # fmt: skip
        sums = {"entropy": entropy.to(torch.float64).sum()}
        return Loss(-(batch.weights * batch.logprobs).sum(), sums, by_token)

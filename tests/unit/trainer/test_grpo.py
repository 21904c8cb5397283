"""GRPO by hand, and accumulation against the whole batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trainer.algorithms import TokenBatch, learns_from_equal
from trainer.algorithms.grpo import GrpoSettings
from trainer.algorithms.reinforce_plus_plus import ReinforcePlusPlusSettings


def test_an_episode_alone_in_its_group_teaches_only_algorithms_that_do_not_compare() -> None:
    assert not learns_from_equal(GrpoSettings().create())
    assert learns_from_equal(ReinforcePlusPlusSettings().create())


def token_batch(logprobs: Tensor, recorded: Tensor, advantages: Tensor) -> TokenBatch:
    """Tokens of one episode."""
    return TokenBatch(
        logprobs=logprobs,
        entropy=-logprobs,
        recorded=recorded,
        advantages=advantages,
        weights=torch.ones_like(recorded),
        sequences=torch.zeros(len(recorded), dtype=torch.int64),
        ids=torch.zeros(len(recorded), dtype=torch.int64),
        staleness=torch.zeros(len(recorded), dtype=torch.int64),
        episodes=1,
        reference=recorded - 0.1,
    )


def test_gradient_is_weight_times_advantage_and_zero_outside_the_clip() -> None:
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5, 9.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    logprobs = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
    settings = GrpoSettings(clip_low=0.2, clip_high=0.28, importance_cap=2.0)
    batch = token_batch(logprobs, logprobs.detach() - ratio.log(), advantages)
    batch = TokenBatch(**{n: getattr(batch, n) for n in batch.__slots__ if n != "reference"})
    loss = settings.create().loss(batch)
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    expected = torch.tensor([-1.0, 0.0, 1.5, -0.5, 0.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)
    assert float(loss.sums["clip_fraction"]) == 2.0


@pytest.mark.parametrize("gap", [-30.0, -19.0, 0.5, 19.0, 30.0])
def test_the_kl_term_pulls_in_proportion_to_the_gap_however_great_it_is(gap: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    batch = token_batch(logprobs, logprobs.detach(), torch.zeros(1))
    loss = GrpoSettings(kl_coef=0.1).create().loss(replace(batch, reference=logprobs.detach() - gap))
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    assert float(gradient) == pytest.approx(0.1 * gap, rel=1e-5)


def test_an_entropy_without_a_bonus_is_not_part_of_the_loss() -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    batch = token_batch(logprobs, logprobs.detach(), torch.ones(1, dtype=torch.float64))
    loss = GrpoSettings().create().loss(replace(batch, entropy=torch.full((1,), math.nan)))
    assert float(loss.total.detach()) == 1.0

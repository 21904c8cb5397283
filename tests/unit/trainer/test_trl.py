"""Gradients of our losses against those of TRL's GRPOTrainer on the same tensors (`tests/harness/trl_losses.py` records them)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.algorithms import TokenBatch
from trainer.algorithms.grpo import Grpo, GrpoSettings

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "trl.json").read_text())
UNBOUNDED = float("inf")


@pytest.mark.parametrize(
    ("case", "ours"),
    [
        ("dapo", {}),
        ("bnpo", {}),
        ("grpo", {"normaliser": "sequence"}),
        ("cispo", {"clip_low": 1.0, "clip_high": UNBOUNDED, "importance_cap": 1.5}),
        ("kl_corrected", {"kl_coef": 0.3, "kl": "k3"}),
    ],
)
def test_our_gradients_are_those_of_trl(case: str, ours: dict[str, Any]) -> None:
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in RECORD["tensors"].items()}
    mask, logprobs = tensors["mask"], tensors["logprobs"].requires_grad_()
    algorithm = Grpo(GrpoSettings(**{"importance_cap": UNBOUNDED, **ours}))
    lengths = mask.sum(1, keepdim=True)
    train = mask.bool()
    sequences = torch.arange(len(mask))[:, None].expand(mask.shape)[train]
    loss = algorithm.loss(
        TokenBatch(
            logprobs=logprobs[train],
            entropy=torch.zeros(len(sequences)),
            recorded=tensors["recorded"][train],
            advantages=tensors["advantages"][sequences],
            weights=(mask / lengths if algorithm.sequence_mean else mask)[train],
            sequences=sequences,
            episodes=len(mask),
            reference=tensors["reference"][train] if algorithm.needs_reference else None,
        )
    )
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    normaliser = len(mask) if algorithm.sequence_mean else mask.sum()
    theirs = torch.tensor(RECORD["cases"][case]["gradient"], dtype=torch.float64)
    assert bool(theirs.any())
    torch.testing.assert_close(gradient / normaliser, theirs, rtol=1e-9, atol=1e-12)

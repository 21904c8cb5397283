"""Gradients of our losses against those of TRL's GRPOTrainer and RLOOTrainer on the same tensors.

`tests/harness/trl_losses.py` records them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.algorithms import REGISTRY, TokenBatch

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "trl.json").read_text())
UNBOUNDED = float("inf")


@pytest.mark.parametrize(
    ("case", "ours"),
    [
        ("dapo", {"type": "dapo"}),
        ("bnpo", {"type": "grpo"}),
        ("grpo", {"type": "grpo", "average": "sequence"}),
        ("dr_grpo", {"type": "dr_grpo", "length": len(RECORD["tensors"]["mask"][0]), "clip_high": 0.28}),
        ("cispo", {"type": "cispo", "importance_cap": 1.5}),
        ("gspo", {"type": "gspo", "clip_low": 0.05, "clip_high": 0.08}),
        ("kl_corrected", {"type": "grpo", "kl_coef": 0.3, "kl": "k3", "kl_cap": UNBOUNDED}),
        ("decoupled", {"type": "ppo", "importance_cap": 1.2, "clip_low": 0.1, "clip_high": 0.15}),
        ("rloo", {"type": "rloo", "correction": "tis_sequence"}),
    ],
)
def test_our_gradients_are_those_of_trl(case: str, ours: dict[str, Any]) -> None:
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in RECORD["tensors"].items()}
    mask, logprobs = tensors["mask"], tensors["logprobs"].requires_grad_()
    kind = REGISTRY[ours["type"]]
    bounds = {"importance_cap": UNBOUNDED} if "importance_cap" in kind.model_fields else {}
    algorithm = kind.model_validate(bounds | ours).create()
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
            ids=torch.zeros_like(sequences),
            staleness=torch.zeros_like(sequences),
            episodes=len(mask),
            reference=tensors["reference"][train] if algorithm.needs_reference else None,
            proximal=tensors["proximal"][train] if algorithm.minibatches > 1 else None,
        )
    )
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    theirs = torch.tensor(RECORD["cases"][case]["gradient"], dtype=torch.float64)
    assert bool(theirs.any())
    ours_of_all = gradient / algorithm.normalizer(int(mask.sum()), len(mask))
    torch.testing.assert_close(ours_of_all, theirs, rtol=1e-9, atol=1e-12)

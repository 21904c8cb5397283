"""How far the weights of two ranks are from those of one after some steps, in float64. Forked processes, gloo."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from bench.trainer.headgate import groups_of, settings_of
from bench.trainer.load import Rollout
from tests.harness.ranks import on_ranks
from trainer.model import pretrained
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer

_STEPS = 2


def two_rank_error(model: Path, batch: list[Rollout], tokens: int, folder: Path) -> float:
    """The greatest absolute difference of any weight, after equal steps of one rank and of two."""
    (one,) = on_ranks(1, _learn, model, batch, tokens, folder / "one")
    two, _ = on_ranks(2, _learn, model, batch, tokens, folder / "two")
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def _learn(model: Path, batch: list[Rollout], tokens: int, folder: Path) -> dict[str, Tensor] | None:
    with patch.dict(pretrained.DTYPES, {"float32": torch.float64}):
        trainer = RankTrainer.open(settings_of(str(model), tokens, 1, folder))
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        return None
    for _ in range(_STEPS):
        trainer.train(groups_of(batch))
    with patch.dict(pretrained.DTYPES, {"float32": torch.float64}):
        weights = {name: tensor.clone() for name, tensor in trainer.gather_weights().items()}
    shutdown_ranks(trainer)
    return weights

"""One rank of `test_ranks`, started by torchrun: trains on the tests' batch, and the first writes the weights."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.gpu.rank_trainers import batch, settings_of
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer


def main(model: Path, folder: Path, device: str, out: Path) -> None:
    """Two steps."""
    trainer = RankTrainer.open(settings_of(model, folder, device))
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        return
    for _ in range(2):
        trainer.train(batch())
    weights = {name: weight.float() for name, weight in trainer.gather_weights().items()}
    shutdown_ranks(trainer)
    torch.save(weights, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))

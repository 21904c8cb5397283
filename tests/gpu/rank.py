"""One rank of `test_ranks`, started by torchrun: trains on the tests' batch, and the first writes the weights."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.gpu.learners import batch, settings_of
from trainer.learner import Learner
from trainer.orders import dismiss, follow


def main(model: Path, folder: Path, device: str, out: Path) -> None:
    """Two steps."""
    learner = Learner.open(settings_of(model, folder, device))
    if not learner.ranks.leads:
        follow(learner)
        return
    for _ in range(2):
        learner.train(batch())
    weights = {name: weight.float() for name, weight in learner.published().items()}
    dismiss(learner)
    torch.save(weights, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))

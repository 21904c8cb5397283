"""The trainer for a trial with fake engines: the same loop, with versions that have no probe.

A fake engine's log-probabilities are not a model's, so every probe would rightly fail.

    python -m examples.lending.unprobed_trainer TRAINER.toml
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import trainer.loop.run
from trainer.config.settings import Settings
from trainer.data.batch import Batch
from trainer.rank_trainer import RankTrainer


class Unprobed(RankTrainer):
    """A trainer whose versions have no probe."""

    def step(self, batch: Batch) -> dict[str, float]:
        measured = super().step(batch)
        self.probe = None
        return measured


def main() -> None:
    trainer.loop.run.RankTrainer = Unprobed  # type: ignore[misc]
    asyncio.run(trainer.loop.run.run(Settings.load(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()

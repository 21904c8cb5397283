"""The TRL example, which also writes what TRL trains: `batch-NUMBER-PROCESS.npz` for each batch, before its step.

It runs in an environment that has TRL: `.venv-trl/bin/python -m tests.harness.trl_recorder FOLDER URL VERSIONS ...`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from examples.trl import train
from examples.trl.adapter import GatewayTrainer

KEPT = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"),
    *("sampling_per_token_logps", "importance_sampling_ratio"),
)


def record(folder: Path) -> None:
    """Write each batch as TRL made it, whole or not at all."""
    made = GatewayTrainer._generate_and_score_completions

    def written(self: Any, inputs: Any) -> Any:
        output = made(self, inputs)
        path = folder / f"batch-{self.batch.number}-{os.getpid()}.npz"
        np.savez(path.with_suffix(".part.npz"), **{name: output[name].numpy() for name in KEPT})
        path.with_suffix(".part.npz").rename(path)
        return output

    GatewayTrainer._generate_and_score_completions = written  # type: ignore[method-assign]


if __name__ == "__main__":
    record(Path(sys.argv.pop(1)))
    train.main()

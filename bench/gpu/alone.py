"""The trainer without engine, gateway and agents: steps on long rows of random tokens, as prime-rl's benchmark has them.

One process that ends with a line of JSON: each step that counts, and the most memory that the device's tensors took.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.workload import THREADS, WORKLOADS, Workload
from bench.trainer.headgate import groups_of
from bench.trainer.load import Rollout, Turn
from trainer.config.settings import Settings
from trainer.rank_rpc import shutdown_ranks
from trainer.rank_trainer import RankTrainer

_WARM_UP = 2
"""Steps that are not counted: kernels are compiled, moments made, and memory found."""
_PROMPT = 1


def settings_of(workload: Workload, model: Path, folder: Path, device: str) -> Settings:
    """Return the recipe's way: all weights, every activation computed again, a row in each micro-batch."""
    return Settings.parse({
        "run": {"dir": folder, "steps": 1_000_000, "device": device, "threads": THREADS[device]},
        "gateway": {"url": "http://127.0.0.1:9"},
        "model": {"path": model, "dtype": workload.dtype, "activation_checkpointing": 1},
        "optimizer": {"lr": 1e-6},
        "batch": {"tokens": workload.row},
    })  # fmt: skip


def rollouts_of(workload: Workload) -> list[Rollout]:
    """Return rows of random tokens, with the log-probabilities of an untrained model; nothing is shared but the first token."""
    draw = np.random.default_rng(1)
    vocabulary = workload.config["vocab_size"]
    found = []
    for number in range(workload.rows):
        ids = draw.integers(0, vocabulary, workload.row, dtype=np.int32)
        logprobs = np.full(workload.row, -math.log(vocabulary), np.float32)
        parts = slice(0, _PROMPT), slice(_PROMPT, None)
        prompt, reply = (
            Turn(turn - 1, turn == 1, ids[part], logprobs[part]) for turn, part in enumerate(parts)
        )
        found.append(Rollout(0, float(number % 2), (prompt, reply)))
    return found


def measure(workload: Workload, model: Path, folder: Path, device: str, steps: int) -> dict[str, Any]:
    """Train on one batch several times, and return the figures of each step."""
    trainer = RankTrainer.open(settings_of(workload, model, folder, device))
    groups = groups_of(rollouts_of(workload))
    counted: list[dict[str, float]] = []
    for _ in range(_WARM_UP + steps):
        began = time.perf_counter()
        result = trainer.train(groups)
        counted.append(result | {"seconds": time.perf_counter() - began})
    shutdown_ranks(trainer)
    return {"steps": counted[_WARM_UP:]}


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=WORKLOADS, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--steps", type=int, required=True)
    given = parser.parse_args()
    print(json.dumps(measure(WORKLOADS[given.shape](), given.model, given.dir, given.device, given.steps)))


if __name__ == "__main__":
    main()

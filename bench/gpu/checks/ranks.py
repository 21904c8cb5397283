"""Two ranks that torchrun starts, over NCCL on GPUs and gloo on CPUs, make the steps of one rank on the CPU.

`python -m bench.gpu.checks.ranks` is one of the two.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from bench.gpu.batches import State, branching, distance, learn, settings_of, tiny_model
from bench.gpu.checks.place import CheckFailed, Figures, Place, require
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer

BOUND = 5e-3
"""The largest difference, as a share of the steps' norm: that of TF32 at most."""
_STEPS = 2
_TAIL = 1000


def measure(place: Place) -> Figures:
    """Return the distance of two ranks' steps from one's."""
    if not place.dry and torch.cuda.device_count() < 2:
        return {"skipped": "NCCL needs a GPU for each rank, and there is one"}
    model = tiny_model(place.folder / "model")
    start, one = (learn(settings_of(model, place.folder / f"one-{n}", "cpu"), n) for n in (0, _STEPS))
    out = place.folder / "two.pt"
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv += ["-m", __name__, str(model), str(place.folder / "two"), place.device, str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckFailed(f"torchrun ended with {done.returncode}: {done.stderr[-_TAIL:]}")
    weights: State = torch.load(out)
    # By the names of parameters: tied ones are published once or twice.
    found = {"distance": distance({name: weights[name] for name in one}, one, over=start)}
    return require(found["distance"] < BOUND, "two ranks make other steps than one", found)


def main(model: Path, folder: Path, device: str, out: Path) -> None:
    """Train as one rank; the first one writes the weights."""
    trainer = RankTrainer.open(settings_of(model, folder, device))
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        return
    for _ in range(_STEPS):
        trainer.train(branching())
    weights = {name: weight.float() for name, weight in trainer.gather_weights().items()}
    shutdown_ranks(trainer)
    torch.save(weights, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))

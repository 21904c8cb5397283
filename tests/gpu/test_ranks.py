"""Two ranks that torchrun starts, over NCCL on GPUs and gloo on CPUs, make the steps of one rank on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.learners import distance, learn, save_tiny, settings_of

ROOT = Path(__file__).parents[2]
BOUND = 5e-3
"""The greatest difference, as a share of the steps' norm: that of TF32 at most."""


def test_two_ranks_make_the_steps_of_one(device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each rank, and there is one")
    model = save_tiny(tmp_path / "model")
    start, one = (learn(settings_of(model, tmp_path / f"one-{steps}", "cpu"), steps) for steps in (0, 2))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "tests.gpu.rank", str(model), str(tmp_path / "two"), device, str(tmp_path / "two.pt")]
    done = subprocess.run([*launch, *program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert distance(_of(tmp_path / "two.pt", one), one, over=start) < BOUND


def _of(path: Path, names: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights by the names of parameters: tied ones are published once or twice."""
    weights = torch.load(path)
    return {name: weights[name] for name in names}

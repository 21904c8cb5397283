"""Two ranks that torchrun starts, over NCCL on GPUs and gloo on CPUs, make the steps of one rank on the CPU.

On CPUs they are forked; who starts them as a user would is `tests/integration/test_launched_ranks.py`, in its long form.
"""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from headgate.processes.child import LocalProcess
from tests.gpu.rank_trainers import CPU_IS_LONG, distance, learn, save_tiny, settings_of
from tests.harness.forked_programs import forked
from tests.harness.waiting import result_of

BOUND = 5e-3
"""The greatest difference, as a share of the steps' norm: that of TF32 at most."""


@pytest.mark.parametrize("device", CPU_IS_LONG, indirect=True)
async def test_two_ranks_make_the_steps_of_one(device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each rank, and there is one")
    model = save_tiny(tmp_path / "model")
    start, one = (learn(settings_of(model, tmp_path / f"one-{steps}", "cpu"), steps) for steps in (0, 2))
    environ: AbstractAsyncContextManager[dict[str, str]] = (
        forked(tmp_path / "forked") if device == "cpu" else nullcontext({})
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "tests.gpu.rank", str(model), str(tmp_path / "two"), device, str(tmp_path / "two.pt")]
    async with environ as more:
        process = await LocalProcess.start("torchrun", [*launch, *program], tmp_path / "log", more)
        try:
            status = await result_of(process.wait(), "torchrun ends", 600.0)
        finally:
            await process.stop(10.0)
    assert status == 0, process.output()
    assert distance(_of(tmp_path / "two.pt", one), one, over=start) < BOUND


def _of(path: Path, names: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights by the names of parameters: tied ones are published once or twice."""
    weights = torch.load(path)
    return {name: weights[name] for name in names}

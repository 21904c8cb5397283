"""The demo by its own commands and files, for its three seeds, on an engine that needs neither vLLM's environment nor its start.

The rewards are of held-out questions by reasoning-gym's scorer, before and after: nothing that is trained has a say in them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from examples.demo.run import SUMS, Demo
from examples.demo.seeds import SEEDS
from gateway.engines.fake import create_fake_app
from processes.ports import free_port
from tests.harness.gateways import serve
from tests.harness.model_engine import ModelEngine
from trainer.commands.warmstart import Recipe, warm_start

RISE = 0.15
"""Measured on vLLM: 0.28 to 0.34."""


class DemoElsewhere(Demo):
    """The demo on an engine that runs already, at `engine_url`."""

    engine_url = ""

    def configure(self) -> None:
        super().configure()
        file = Path(self.path("gateway.toml"))
        engine = f'[engine]\nlaunch = "external"\nurl = "{self.engine_url}"\nhealth_s = 60\nstall_s = 600\n\n[sampling]'
        text, found = re.subn(r"\[engine\].*\[sampling\]", engine, file.read_text(), flags=re.DOTALL)
        assert found == 1
        file.write_text(text)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", SEEDS)
async def test_the_demos_reward_rises(seed: int, tmp_path: Path) -> None:
    demo, port = DemoElsewhere(tmp_path / "demo", seed), free_port()
    demo.engine_url = f"http://127.0.0.1:{port}"
    warm_start(Recipe.load(SUMS.folder / "warmstart.toml"), tmp_path / "model")
    torch.set_num_threads(1)  # after the warm start, which takes what its recipe says
    async with serve(create_fake_app(ModelEngine(str(tmp_path / "model"))), port):
        summary = await demo.run()
    assert summary["reward_after"] - summary["reward_before"] > RISE, summary
    assert summary["failed_requests"] == 0
    assert summary["logprob_gap_max"] < 1e-3

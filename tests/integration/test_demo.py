"""The demos by their own commands and files, for their three seeds, on an engine that needs neither vLLM nor its start.

The rewards are of held-out questions by reasoning-gym's scorer, before and after: nothing that is trained computes them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo.run import Demo
from examples.demo.seeds import SEEDS
from examples.environments.run import CHAIN_SUM, EnvironmentDemo
from gateway.engines.fake import create_fake_app
from headgate.processes.ports import free_port
from tests.harness.gateways import serve
from tests.harness.model_engine import ModelEngine
from trainer.commands.warmstart import Recipe, warm_start

DEMO_RISE = 0.15
"""Measured on vLLM: 0.28 to 0.34."""
ENVIRONMENT_RISE = 0.1
"""Measured on this engine: 0.17 to 0.34."""


class Elsewhere(Demo):
    """A demo on an engine that runs already, at `engine_url`."""

    engine_url = ""

    def configure(self) -> None:
        super().configure()
        file = Path(self.path("gateway.toml"))
        engine = f'[engine]\nlaunch = "external"\nurl = "{self.engine_url}"\nhealth_s = 60\nstall_s = 600\n\n[sampling]'
        text, found = re.subn(r"\[engine\].*\[sampling\]", engine, file.read_text(), flags=re.DOTALL)
        assert found == 1
        file.write_text(text)


class EnvironmentElsewhere(Elsewhere, EnvironmentDemo):
    """The same with the tasks and the scorer of an environment."""


async def run(demo: Elsewhere, work: Path) -> dict[str, Any]:
    """The demo's summary."""
    port = free_port()
    demo.engine_url = f"http://127.0.0.1:{port}"
    warm_start(Recipe.load(demo.job.folder / "warmstart.toml"), work / "model")
    torch.set_num_threads(1)  # after the warm start, which uses the threads of its recipe
    async with serve(create_fake_app(ModelEngine(str(work / "model"))), port):
        return await demo.run()


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", SEEDS)
async def test_the_demos_reward_rises(seed: int, tmp_path: Path) -> None:
    learnt(await run(Elsewhere(tmp_path / "demo", seed), tmp_path), DEMO_RISE)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", SEEDS)
async def test_the_reward_of_an_environment_rises(seed: int, tmp_path: Path) -> None:
    demo = EnvironmentElsewhere(tmp_path / "demo", seed, job=CHAIN_SUM)
    learnt(await run(demo, tmp_path), ENVIRONMENT_RISE)


@pytest.mark.long
@pytest.mark.timeout(7200)
async def test_an_environments_reward_stays_where_weights_are_frozen(tmp_path: Path) -> None:
    summary = await run(EnvironmentElsewhere(tmp_path / "demo", SEEDS[0], True, CHAIN_SUM), tmp_path)
    assert summary["reward_after"] == pytest.approx(summary["reward_before"], abs=0.01)


def learnt(summary: dict[str, Any], rise: float) -> None:
    assert summary["reward_after"] - summary["reward_before"] > rise, summary
    assert summary["failed_requests"] == 0
    assert summary["logprob_gap_max"] < 1e-3

"""The verl example on an engine that computes from the weights: it trains the recorded tokens, also when it is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.fences import ROOT
from tests.harness.foreign import (
    STEPS,
    check_recorded_tokens_are_trained_once_although_killed,
    read_trained,
)
from tests.harness.gateways import RunningGateway

PYTHON = ROOT / ".venv-verl" / "bin" / "python"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason="verl is not here: make verl makes .venv-verl"),
]


async def test_verl_trains_what_was_recorded_once_although_it_is_killed(tmp_path: Path) -> None:
    def command(gateway: RunningGateway) -> list[str]:
        program = [
            str(PYTHON),
            "-m",
            "tests.harness.verl_recorder",
            str(tmp_path),
            "actor_rollout_ref.actor.optim.lr=1e-3",
        ]
        settings = (
            f"trainer.v1.headgate.url={gateway.url}",
            f"trainer.v1.headgate.versions={tmp_path}/versions",
        )
        return [*program, *settings, f"trainer.total_training_steps={STEPS}"]

    # verl's actor computes in bfloat16.
    await check_recorded_tokens_are_trained_once_although_killed(
        tmp_path, command, read_trained, tolerance=0.05
    )

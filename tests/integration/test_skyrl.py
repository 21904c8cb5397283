"""The SkyRL example on an engine that computes from the weights: it trains the recorded tokens, also when it is killed."""

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

PYTHON = ROOT / ".venv-skyrl" / "bin" / "python"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason="SkyRL is not here: make skyrl makes .venv-skyrl"),
]


async def test_skyrl_trains_what_was_recorded_once_although_it_is_killed(tmp_path: Path) -> None:
    def command(gateway: RunningGateway) -> list[str]:
        program = [
            str(PYTHON),
            "-m",
            "tests.harness.skyrl_cpu",
            str(tmp_path),
            gateway.url,
            f"{tmp_path}/versions",
        ]
        return [*program, f"trainer.max_training_steps={STEPS}"]

    await check_recorded_tokens_are_trained_once_although_killed(tmp_path, command, read_trained)

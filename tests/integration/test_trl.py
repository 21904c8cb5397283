"""The TRL example on an engine that computes from the weights: it trains the recorded tokens, also when it is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.harness.fences import ROOT
from tests.harness.foreign import (
    GROUP_SIZE,
    GROUPS,
    STEPS,
    Trained,
    check_recorded_tokens_are_trained_once_although_killed,
)
from tests.harness.gateways import RunningGateway

pytestmark = [pytest.mark.clients, pytest.mark.long, pytest.mark.timeout(1800)]

PYTHON = ROOT / ".venv-trl" / "bin" / "python"


async def test_trl_trains_what_was_recorded_once_although_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PYTHON.exists(), "make trl makes .venv-trl"
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def command(gateway: RunningGateway) -> list[str]:
        sizes = [
            "--groups",
            str(GROUPS),
            "--group-size",
            str(GROUP_SIZE),
            "--lr",
            "1e-2",
            "--steps",
            str(STEPS),
        ]
        program = [str(PYTHON), "-m", "tests.harness.trl_recorder", str(tmp_path)]
        return [*program, gateway.url, str(tmp_path / "versions"), *sizes]

    await check_recorded_tokens_are_trained_once_although_killed(tmp_path, command, trained)


def trained(file: Path) -> Trained:
    """Return what TRL trains."""
    output = np.load(file)
    found = []
    for row in range(len(output["prompt_ids"])):
        prompt = output["prompt_ids"][row][output["prompt_mask"][row] > 0]
        real = output["completion_mask"][row] > 0
        mask = output["tool_mask"][row][real] > 0
        if mask.any():
            ids = (*prompt.tolist(), *output["completion_ids"][row][real].tolist())
            logprobs = output["sampling_per_token_logps"][row][real][mask]
            found.append((ids, (*[False] * len(prompt), *mask.tolist()), tuple(logprobs.tolist())))
    every = (output["completion_mask"] * output["tool_mask"]) > 0
    return Trained(found, output["importance_sampling_ratio"][every])

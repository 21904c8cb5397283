"""`gateway doctor` finds nothing wrong with a real vLLM that was started as the gateway needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.settings import Settings
from gateway.doctor import engines
from tests.harness.gateways import settings_for
from tests.harness.models import save_model
from tests.harness.vllm import SharedEngine

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


async def test_a_real_vllm_is_found_well(vllm: SharedEngine, tmp_path: Path) -> None:
    save_model(tmp_path / "model", seed=5, endless=True)
    settings = Settings.parse(settings_for(tmp_path / "model", tmp_path, engine=vllm.settings))
    async with vllm.running(tmp_path / "model"):
        release, logprobs = await engines.examine_engines(settings)
    assert release.level == "ok" and "is vLLM 0.32" in release.what
    assert logprobs.level == "ok" and "what it sampled from" in logprobs.what

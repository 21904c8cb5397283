"""A gateway that starts real vLLM itself, and starts it again where that is the only way to a version."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.engines.vllm import VLLMEngine
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.models import logprobs, probe_of, save_model
from tests.harness.vllm import vllm_settings
from tests.harness.weights import publish

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

NOISE = 2e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three with tied embeddings that have nothing else in common: the first version, and one for each test."""
    root = tmp_path_factory.mktemp("tied")
    found = [root / str(number) for number in range(3)]
    for seed, path in enumerate(found, 10):
        save_model(path, seed, tied=True)
    return found


@pytest.fixture(scope="module")
async def gateway(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    work = tmp_path_factory.mktemp("work")
    engine = vllm_settings(work / "engine.log") | {"start_s": 600}
    values = settings_for(models[0], work, engine=engine, update={"load_s": 20})
    async with run_gateway(values, in_process=False) as running:
        yield running


async def check_runs(gateway: RunningGateway, version: int, model: Path) -> None:
    """The engine's log-probabilities are those that transformers computes from the version's checkpoint."""
    episode, headers = await gateway.open("after")
    assert (await gateway.chat(headers, max_tokens=16)).status_code == 200
    prompt, turn = (await gateway.admin.trajectory(episode))["nodes"]
    truth = logprobs(model, prompt["ids"] + turn["ids"])[-len(turn["ids"]) :]
    assert turn["logprobs"] == pytest.approx(truth, abs=NOISE)
    assert turn["versions"] == [[version, len(turn["ids"])]]


async def test_an_engine_with_tied_embeddings_is_caught_and_restarted(
    gateway: RunningGateway, models: list[Path], tmp_path: Path
) -> None:
    """vLLM's CPU build leaves a tied output head stale on reload without an error: only the probe finds it."""
    (before,) = (await gateway.admin.status())["engines"]
    version = before["version"] + 1
    new = publish(models[1], tmp_path / "new", version, version - 1, probe_of(models[1], models[0]))
    record = await gateway.admin.publish(version, str(new), wait_s=600)
    assert record["state"] == "live"
    report = record["report"][0]
    assert f"does not hold version {version}" in report["failure"]
    assert "launch" in report["seconds"]
    assert report["probe"]["verdict"] == "passed"
    await check_runs(gateway, version, models[1])


async def test_an_engine_that_is_stopped_while_it_loads_is_at_fault_and_not_the_version(
    gateway: RunningGateway, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = (await gateway.admin.status())["engines"]
    version = before["version"] + 1
    load = VLLMEngine.load

    async def stopped(self: VLLMEngine, path: str) -> None:
        os.killpg(before["pid"], signal.SIGSTOP)
        await load(self, path)

    monkeypatch.setattr(VLLMEngine, "load", stopped)
    new = publish(models[2], tmp_path / "new", version, version - 1, probe_of(models[2], models[0]))
    record = await gateway.admin.publish(version, str(new), wait_s=600)
    assert record["state"] == "live"
    assert "step 'load' was not done within 20 s" in record["report"][0]["failure"]
    (engine,) = (await gateway.admin.status())["engines"]
    assert (engine["state"], engine["version"]) == ("open", version)
    assert engine["pid"] != before["pid"]
    await check_runs(gateway, version, models[2])

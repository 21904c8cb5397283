"""Versions that real vLLM receives from the trainer's server; the ground truth is computed by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.gateways import run_gateway, settings_for
from tests.harness.models import logprobs, probe_of, save_model
from tests.harness.programs import sender_of
from tests.harness.vllm import vllm_settings
from tests.harness.weights import publish_pieces

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
]  # it starts vLLM twice; the fake engine shows the same in seconds

NOISE = 2e-3


async def test_a_tied_head_that_vllm_leaves_stale_is_found_and_the_engine_starts_with_the_version(
    tmp_path: Path,
) -> None:
    models = [tmp_path / "first", tmp_path / "second"]
    for seed, path in enumerate(models, 10):
        save_model(path, seed, tied=True)
    versions = tmp_path / "versions"
    new = publish_pieces(models[1], versions / "v000001", 1, 0, probe_of(models[1], models[0]))
    sender = sender_of(versions)
    await sender.start()
    engine = vllm_settings(tmp_path / "engine.log") | {"start_s": 600}
    engine["transport"] = "collective"
    values = settings_for(models[0], tmp_path, engine=engine, weights={"sources": [sender.url]})
    try:
        async with run_gateway(values, in_process=False) as gateway:
            record = await gateway.admin.publish(1, str(new), wait_s=600)
            assert record["state"] == "live"
            (report,) = record["report"]
            assert "does not hold version 1" in report["failure"], "it was sent, taken, and found out"
            assert "launch" in report["seconds"]
            assert report["probe"]["verdict"] == "passed"
            episode, headers = await gateway.open("after")
            assert (await gateway.chat(headers, max_tokens=16)).status_code == 200
            prompt, turn = (await gateway.admin.trajectory(episode))["nodes"]
            truth = logprobs(models[1], prompt["ids"] + turn["ids"])[-len(turn["ids"]) :]
            assert turn["logprobs"] == pytest.approx(truth, abs=NOISE)
            assert turn["versions"] == [[1, len(turn["ids"])]]
    finally:
        sender.kill()

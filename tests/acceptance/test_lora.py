"""Adapters that real vLLM runs side by side; the ground truth is computed by transformers from merged weights.

The first version has tied embeddings, which vLLM's CPU build would leave stale if it loaded whole weights: it loads none.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.models import logprobs, probe_of, save_model
from tests.harness.records import nodes_of, path_to
from tests.harness.vllm import vllm_settings
from tests.harness.weights import write_manifest_of_pieces

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
]  # the fake engine shows the same in seconds; adapters on vLLM: test_exact_loads

NOISE = 2e-3
TOKENS = 2_000
"""Enough that a call lasts longer than two updates, on a loaded machine too."""
RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "down_proj")


def adapt(base: Path, version: int, directory: Path) -> tuple[Path, Path]:
    """A random adapter, and the checkpoint that it amounts to."""
    random, weights = np.random.default_rng(version), load_file(base / "model.safetensors")
    factors: dict[str, Any] = {}
    for name in sorted(weights):
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            outer, inner = weights[name].shape
            a, b = (
                random.normal(0, 0.3, shape).astype(np.float32) for shape in ((RANK, inner), (outer, RANK))
            )
            b[0] = 0.0  # by this dimension the model forbids the end of a reply
            factors[f"base_model.model.{module}.lora_A.weight"] = a
            factors[f"base_model.model.{module}.lora_B.weight"] = b
            weights[name] = weights[name] + ALPHA / RANK * b @ a
    merged = directory / f"merged-{version}"
    shutil.copytree(base, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    adapter = directory / f"v{version:06d}"
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter, merged


async def stream(gateway: RunningGateway, headers: dict[str, str], tokens: int, begun: asyncio.Event) -> None:
    """One long reply; `begun` is set when the first of it has come."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": tokens,
        "stream": True,
    }
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                begun.set()


async def test_calls_end_under_the_adapter_that_they_began_with_to_the_log_probability(
    tmp_path: Path,
) -> None:
    base = tmp_path / "base"
    save_model(base, 10, tied=True, endless=True, length=4096)
    truth = {0: base}
    adapters = {}
    for version in (1, 2, 3):
        adapters[version], truth[version] = adapt(base, version, tmp_path)
        probe = probe_of(truth[version], truth[version - 1])
        write_manifest_of_pieces(adapters[version], version, version - 1, probe)
    engine = vllm_settings(tmp_path / "engine.log") | {"start_s": 600}
    values = settings_for(base, tmp_path, engine=engine | {"transport": "lora"})
    values["models"]["demo"]["max_model_len"] = 4096
    async with run_gateway(values, in_process=False) as gateway:
        calls, episodes = [], []
        for version in (1, 2, 3):
            episode, headers = await gateway.open(f"under {version - 1}", mode="eval")
            begun = asyncio.Event()
            episodes.append(episode)
            calls.append(asyncio.create_task(stream(gateway, headers, TOKENS, begun), name=episode))
            await begun.wait()
            record = await gateway.admin.publish(version, str(adapters[version]), wait_s=300)
            assert record["state"] == "live", record["why"]
            (report,) = record["report"]
            assert report["failure"] == ""
            assert report["probe"]["verdict"] == "passed"
        await asyncio.gather(*calls)
        crossed = 0
        for number, episode in enumerate(episodes):
            nodes = await nodes_of(gateway, episode)
            (turn,) = (node for node in nodes if node["sampled"])
            began = [version for version, _ in turn["versions"]]
            assert began == list(range(number, number + len(began))), "no version is left out"
            crossed += len(began) > 1
            assert len(turn["ids"]) == TOKENS
            context, at = path_to(nodes, turn), 0
            for version, count in turn["versions"]:
                ids = context + turn["ids"][: at + count]
                assert turn["logprobs"][at : at + count] == pytest.approx(
                    logprobs(truth[version], ids)[-count:], abs=NOISE
                )
                at += count
        assert began == [2], "the last one had no reason to leave"
        assert crossed, "a call goes on under a newer adapter"
        engine, ids = gateway.slot.engine, turn["ids"]
        await engine.pause()
        await engine.forget_adapters()
        await engine.resume()
        assert await engine.score(ids) == pytest.approx(logprobs(truth[0], ids), abs=NOISE), "the base alone"

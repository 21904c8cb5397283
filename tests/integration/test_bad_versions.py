"""Versions that no engine can run. The fake engine falls ill of some weights, whichever of its processes loads them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.agents import agent
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.records import check_everything, check_sampled_by_the_fake, nodes_of
from tests.harness.weights import SEQUENCE, fake_weights, probe_of, publish


def ill(tmp_path: Path, version: int, parent: int, loading: str) -> Path:
    """A version that cannot be loaded, or that no engine's log-probabilities agree with."""
    source = fake_weights(tmp_path / f"ill-{version}", f"ill {version}")
    if loading != "other":
        (source / "faults.json").write_text(json.dumps({"loading": loading}))
    other = [[-9.0] * (len(SEQUENCE) - 1)]
    probe = {
        "sequences": [SEQUENCE],
        "new_logprobs": other,
        "parent_logprobs": [[-3.0] * (len(SEQUENCE) - 1)],
    }
    return publish(source, tmp_path / f"v{version}", version, parent, probe)


def sound(tmp_path: Path, version: int, parent: Path) -> Path:
    source = fake_weights(tmp_path / f"sound-{version}", f"sound {version}")
    return publish(source, tmp_path / f"v{version}", version, 0, probe_of(source, parent))


async def states(gateway: RunningGateway) -> list[tuple[str, int]]:
    engines = (await gateway.admin.status())["engines"]
    return [(engine["state"], engine["version"]) for engine in engines]


@pytest.mark.parametrize(
    ("loading", "why", "order"),
    [
        ("fails", "RuntimeError: these weights cannot be loaded (fault)", "pull"),
        ("dies", "was killed by signal 9", "rolling"),
        pytest.param("hangs", "was not ready within 60 s", "rolling", marks=pytest.mark.long),
        ("other", "does not run version 1: its log-probabilities are", "rolling"),
    ],
)
async def test_a_bad_version_leaves_the_engines_with_the_one_before(
    tiny_model: Path, tmp_path: Path, loading: str, why: str, order: str
) -> None:
    """Two engines, none of which may be restarted for a fault of its own; agents talk to them all the time."""
    engine: dict[str, Any] = {"count": 2, "max_restarts": 1, "args": ["--delay-s", "0.01"]}
    update: dict[str, Any] = {"order": order}
    if loading == "hangs":  # only a timeout shows it
        engine["start_s"], update["load_s"] = 60, 1.0
    values = settings_for(tiny_model, tmp_path, engine=engine, update=update)
    bad = ill(tmp_path, 1, 0, loading)
    async with run_gateway(values, in_process=False) as gateway:
        done = asyncio.Event()
        agents = [asyncio.create_task(agent(gateway, done, i), name=f"agent-{i}") for i in range(2)]
        record = await gateway.admin.publish(1, str(bad), wait_s=600)
        done.set()
        assert (record["state"], record["bad"]) == ("failed", True)
        assert why in record["why"]
        assert "\n" not in record["why"]
        assert await states(gateway) == [("open", 0), ("open", 0)]
        assert (await gateway.http.get("/readyz")).status_code == 200
        await check_everything(gateway, {0: tiny_model.resolve()}, list(await asyncio.gather(*agents)))

        assert await gateway.admin.publish(1, str(bad), wait_s=600) == record, "it is not tried again"
        assert await states(gateway) == [("open", 0), ("open", 0)]
        assert await gateway.admin.weights(1) == record
        status = await gateway.admin.status()
        assert status["bad_versions"] == [{"version": 1, "why": record["why"]}]
        assert status["version"] == 0


async def test_after_a_bad_version_comes_the_next_and_a_restart_remembers(
    tiny_model: Path, tmp_path: Path
) -> None:
    values = settings_for(tiny_model, tmp_path, engine={"max_restarts": 0})
    first, second = ill(tmp_path, 1, 0, "fails"), ill(tmp_path, 2, 0, "other")
    async with run_gateway(values, in_process=False) as gateway:
        records = [await gateway.admin.publish(v, str(p), wait_s=600) for v, p in ((1, first), (2, second))]
        assert [record["bad"] for record in records] == [True, True]
    async with run_gateway(values, in_process=False) as gateway:
        assert [entry["version"] for entry in (await gateway.admin.status())["bad_versions"]] == [1, 2]
        assert 'headgate_bad_versions{model="demo"} 2.0' in (await gateway.http.get("/metrics")).text
        assert await gateway.admin.publish(2, str(second), wait_s=600) == records[1]
        third = sound(tmp_path, 3, tiny_model)
        assert (await gateway.admin.publish(3, str(third), wait_s=600))["state"] == "live"
        assert (await gateway.admin.status())["orphaned_versions"] == [1, 2]
        episode, headers = await gateway.open("after", mode="eval")
        assert (await gateway.chat(headers, max_tokens=8)).status_code == 200
        nodes = await nodes_of(gateway, episode)
        check_sampled_by_the_fake(nodes, nodes[-1], {3: third})


async def test_tensors_are_compared_before_any_engine_is_touched(tiny_model: Path, tmp_path: Path) -> None:
    folder = sound(tmp_path, 1, tiny_model)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content.replace(b"model.norm.weight", b"model.room.weight"))
    manifest = json.loads((folder / "manifest.json").read_text())
    bad = publish(folder, tmp_path / "renamed", 1, 0, manifest["probe"])
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        response = await gateway.http.post("/admin/v1/weights", json={"version": 1, "path": str(bad)})
        assert response.status_code == 422
        error: dict[str, Any] = response.json()["error"]
        assert error["code"] == "wrong_tensors"
        assert "tensor 'model.room.weight' is not one of the first version's" in error["message"]
        assert gateway.engine.label == "0"
        assert (await gateway.http.get("/admin/v1/weights/1")).status_code == 404, "the number is still free"

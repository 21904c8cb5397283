"""`trainer eval`, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.client import EpisodeOutcome, GatewayClient
from tests.harness.gateways import RunningGateway
from trainer.commands.evaluate import evaluate, summary, warnings
from trainer.errors import ConfigError
from trainer.model import pretrained as model
from trainer.publish.filesystem import WeightsDirectory
from trainer.settings import Settings


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """An agent that asks once, and fails on one task; on another it publishes version 1 before."""
    if task["task_id"] == "bad":
        raise ValueError("no")
    if weights := task.get("publish"):
        async with GatewayClient(task["admin"]) as admin:
            assert (await admin.publish(1, weights, 60.0))["state"] == "live"
    body = {"model": "any", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers) as http:
        (await http.post("chat/completions", json=body)).raise_for_status()
    return float(task["worth"])


def settings_of(url: str, model: Path, **tables: Any) -> Settings:
    return Settings.parse({
        "run": {"dir": model / "run", "steps": 1},
        "gateway": {"url": url},
        "model": {"path": model},
        "optimizer": {"lr": 1e-3},
        **tables,
    })  # fmt: skip


async def test_the_last_line_is_the_result(
    gateway: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [{"task_id": f"t{i}", "worth": i % 2} for i in range(4)] + [{"task_id": "bad"}]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    rollout = {"agent": f"{__name__}:solve", "tasks": tmp_path / "tasks.jsonl"}
    settings = settings_of(gateway.url, tmp_path, rollout=rollout)
    await evaluate(settings, tmp_path / "tasks.jsonl", tmp_path / "out.json")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["reward_mean"], result["tasks"], result["failed"], result["version"]) == (0.5, 5, 1, 0)
    assert len(json.loads((tmp_path / "out.json").read_text())["outcomes"]) == 5


async def test_the_versions_are_those_that_the_episodes_were_sampled_by(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of three tasks comes with an update, as if training went on."""
    weights = WeightsDirectory(tmp_path / "weights", tiny_model).write(1, 0, model.load(tiny_model), None)
    tasks: list[dict[str, Any]] = [{"task_id": name, "worth": 1} for name in ("t0", "t1", "t2", "bad")]
    tasks[1] |= {"publish": str(weights), "admin": gateway.url}
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    rollout = {"agent": f"{__name__}:solve", "tasks": tmp_path / "tasks.jsonl", "concurrency": 1}
    settings = settings_of(gateway.url, tmp_path, rollout=rollout)
    await evaluate(settings, tmp_path / "tasks.jsonl", tmp_path / "out.json")
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert (result["version"], result["versions"]) == (0, {"0": 1, "1": 2})
    assert (result["reward_mean"], result["reward_mean_failed_as_0"]) == (1.0, 0.75)
    assert (result["tasks"], result["rewarded"], result["failed"]) == (4, 3, 1)
    outcomes = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert [outcome["versions"] for outcome in outcomes] == [[0], [1], [1], []]
    said = " ".join(out.split())
    assert "1 of 4 episodes failed: reward_mean leaves them out" in said
    assert "updated after the evaluation began at version 0" in said
    assert "(1 of version 0, 2 of version 1)" in said


def test_nothing_is_warned_of_where_one_version_sampled_every_episode() -> None:
    rewarded = EpisodeOutcome("t", "g", "e", 1.0)
    assert warnings(summary([rewarded], {"e": [3]}, 3, 1.0)) == []
    assert len(warnings(summary([rewarded], {"e": [4]}, 3, 1.0))) == 1


async def test_without_an_agent_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollout"):
        await evaluate(settings_of("http://127.0.0.1:1", tmp_path), tmp_path / "x")


def test_a_result_of_failures_has_no_mean() -> None:
    failed = EpisodeOutcome("t", "g", None, None, error="refused")
    result = summary([failed], {}, 3, 1.0)
    assert (result["reward_mean"], result["reward_mean_failed_as_0"]) == (None, 0.0)


def test_help_loads_neither_torch_nor_the_gateway() -> None:
    code = (
        "import sys, trainer.cli\n"
        "assert not {'torch', 'transformers', 'httpx', 'pyarrow'} & set(sys.modules), sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wrong_configuration_is_one_message_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("[run]\nstep = 1\n")
    command = [sys.executable, "-m", "trainer.cli", "run", str(tmp_path / "t.toml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "run.step" in done.stderr
    assert "Traceback" not in done.stderr

"""`trainer eval`, and the command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from headgate.client import GatewayClient
from tests.harness.forks import command
from tests.harness.gateways import RunningGateway
from trainer.cli import app
from trainer.commands.evaluate import evaluate
from trainer.config.settings import Settings
from trainer.errors import ConfigError
from trainer.evaluation.episodes import read
from trainer.model import pretrained as model
from trainer.publish.filesystem import WeightsDirectory


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """An agent with one call, which fails on one task; on another it publishes version 1 before."""
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


def write(path: Path, *tasks: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, tasks)))
    return path


async def test_the_last_line_is_the_result_of_all_files_and_of_each(
    gateway: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    easy = write(
        tmp_path / "easy.jsonl", *({"task_id": f"t{i}", "worth": 1} for i in range(3)), {"task_id": "bad"}
    )
    hard = write(tmp_path / "hard.jsonl", {"task_id": "t0", "worth": 0}, {"task_id": "t1", "worth": 0.5})
    settings = settings_of(
        gateway.url,
        tmp_path,
        rollout={"agent": f"{__name__}:solve", "tasks": tmp_path / "unused.jsonl"},
        eval={"tasks": [easy, hard], "samples": 2, "temperature": 0.0},
    )
    await evaluate(settings, tmp_path / "out.json")
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert {name: each["reward_mean"] for name, each in result["files"].items()} == {
        "easy": 1.0,
        "hard": 0.25,
    }
    assert {name: each["pass@1"] for name, each in result["files"].items()} == {"easy": 0.75, "hard": 0.0}
    assert (result["reward_mean"], result["reward_mean_failed_as_0"]) == (0.7, round(7 / 12, 6))
    assert (result["tasks"], result["episodes"], result["failed"], result["version"]) == (6, 12, 2, 0)
    assert [line.split()[1] for line in out.splitlines() if line.startswith("│")] == [
        "easy",
        "hard",
        "overall",
    ]
    outcomes = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert [outcome["task_id"] for outcome in outcomes[:6:2]] == ["t0", "t1", "t2"]
    evaluated = await gateway.admin.episodes(mode="eval", limit=100)
    assert len(evaluated) == 12
    for episode in evaluated:
        calls = (await gateway.admin.episode(episode["episode_id"]))["calls"]
        assert [call["used"]["temperature"] for call in calls] == [0.0] * len(calls)
    assert "greedy samples of one task differ only by chance" in " ".join(out.split())


async def test_the_versions_are_those_that_the_episodes_were_sampled_by(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of three tasks comes with an update, as if training went on."""
    weights = WeightsDirectory(tmp_path / "weights", tiny_model).write(1, 0, model.load(tiny_model), None)
    tasks: list[dict[str, Any]] = [{"task_id": name, "worth": 1} for name in ("t0", "t1", "t2", "bad")]
    tasks[1] |= {"publish": str(weights), "admin": gateway.url}
    file = write(tmp_path / "tasks.jsonl", *tasks)
    rollout = {"agent": f"{__name__}:solve", "tasks": file, "concurrency": 1}
    await evaluate(
        settings_of(gateway.url, tmp_path, rollout=rollout, eval={"tasks": [file]}), tmp_path / "out.json"
    )
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert (result["version"], result["versions"]) == (0, {"0": 1, "1": 2})
    assert (result["reward_mean"], result["reward_mean_failed_as_0"]) == (1.0, 0.75)
    assert (result["tasks"], result["rewarded"], result["failed"]) == (4, 3, 1)
    outcomes = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert [outcome["versions"] for outcome in outcomes] == [[0], [1], [1], []]
    message = " ".join(out.split())
    assert "1 of 4 episodes failed: reward_mean leaves them out" in message
    assert "updated after the evaluation began at version 0" in message
    assert "(1 of version 0, 2 of version 1)" in message


async def test_without_an_agent_or_tasks_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[eval\] agent"):
        await evaluate(settings_of("http://127.0.0.1:1", tmp_path))
    agent = {"agent": f"{__name__}:solve"}
    with pytest.raises(ConfigError, match=r"--tasks FILE, or \[eval\] tasks"):
        await evaluate(settings_of("http://127.0.0.1:1", tmp_path, eval=agent))
    empty, folder = write(tmp_path / "empty.jsonl"), tmp_path / "a"
    folder.mkdir()
    for tasks, message in (
        ([empty], "has no task"),
        ([tmp_path / "no.jsonl"], "no.jsonl"),
        ([empty, empty], "has no task"),
    ):
        with pytest.raises(ConfigError, match=message):
            await evaluate(settings_of("http://127.0.0.1:1", tmp_path, eval=agent | {"tasks": tasks}))
    some = [write(tmp_path / "some.jsonl", {"task_id": "t0"})]
    for name in ("no_such_module:solve", f"{tmp_path}/nothing.py:solve"):
        with pytest.raises(ConfigError, match="agent of an evaluation: there is no"):
            await evaluate(settings_of("http://127.0.0.1:1", tmp_path, eval={"agent": name, "tasks": some}))


def test_files_of_one_name_are_distinguished_by_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first, second = (write(tmp_path / place, {"task_id": "t"}) for place in ("x.jsonl", "b/x.jsonl"))
    assert list(read([first, second, write(tmp_path / "y.jsonl", {"task_id": "t"})])) == [
        str(first),
        str(second),
        "y",
    ]
    with pytest.raises(ConfigError, match="named twice"):
        read([first, first])


async def test_the_command_line_wins_over_the_file(gateway: RunningGateway, tmp_path: Path) -> None:
    file = write(tmp_path / "tasks.jsonl", {"task_id": "t", "worth": 1})
    config = tmp_path / "trainer.toml"
    config.write_text(f"""
        run = {{ dir = "{tmp_path}/run", steps = 1 }}
        gateway = {{ url = "{gateway.url}" }}
        model = {{ path = "{tmp_path}" }}
        optimizer = {{ lr = 0.1 }}
        eval = {{ tasks = ["other.jsonl"], agent = "{__name__}:solve", samples = 8, temperature = 1.0 }}
    """)
    argv = ["eval", str(config), "--tasks", str(file), "--samples", "2", "--greedy"]
    status, message = await asyncio.to_thread(partial(command, "trainer.cli", *argv, folder=tmp_path))
    assert status == 0, message
    result = json.loads(message.splitlines()[-1])
    assert (result["samples"], result["temperature"], result["pass@2"], list(result["files"])) == (
        *(2, 0, 1.0),
        ["tasks"],
    )
    assert CliRunner().invoke(app, [*argv, "--temperature", "0.5"]).exit_code == 2


def test_help_loads_neither_torch_nor_the_gateway() -> None:
    code = (
        "import sys, trainer.cli\n"
        "assert not {'torch', 'transformers', 'httpx', 'pyarrow'} & set(sys.modules), sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

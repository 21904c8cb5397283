"""The gateway's URL as the trainer derives it, and the commands by which it starts the gateway and a server of weights."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from headgate.client.agents import CommandAgent
from headgate.processes.ports import free_port
from tests.harness.gateways import serve
from trainer.config.run import GatewaySettings
from trainer.config.settings import Settings
from trainer.config.state import PublishSettings
from trainer.errors import ConfigError, GatewayUnreachable
from trainer.evaluation.episodes import Evaluation
from trainer.loop.children import gateway_process, rollout_process, url_of, weights_process


def written(directory: Path, text: str) -> Path:
    path = directory / "gateway.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("", "http://127.0.0.1:8000"),
        ('[server]\nhost = "10.0.0.7"\nport = 9000', "http://10.0.0.7:9000"),
        ('[server]\nhost = "0.0.0.0"', "http://127.0.0.1:8000"),
        ('[server]\nhost = "::"', "http://127.0.0.1:8000"),
        ('[server]\nhost = "::1"', "http://[::1]:8000"),
    ],
)
def test_the_url_of_the_gateway_comes_from_its_file(tmp_path: Path, text: str, url: str) -> None:
    assert url_of(written(tmp_path, text)) == url


def test_a_file_without_a_usable_address_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.toml: with \[server\] port = 0"):
        url_of(written(tmp_path, "[server]\nport = 0"))
    with pytest.raises(ConfigError, match=r"\[gateway\] config .*gateway\.toml: "):
        url_of(written(tmp_path, "[server"))
    with pytest.raises(ConfigError, match=r"absent\.toml: .*No such file"):
        url_of(tmp_path / "absent.toml")


async def test_a_gateway_is_started_with_the_trainers_key_and_logs_into_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    async def start(*given: Any) -> Any:
        started.append(given)

        async def ready(_responds: Any, limit_s: float, _report: Any) -> None:
            started.append(limit_s)

        return SimpleNamespace(stop=None, ready=ready)

    monkeypatch.setattr("trainer.loop.children.LocalProcess.start", start)
    monkeypatch.setattr("trainer.loop.children._fail_when_it_ends", lambda process: None)
    port = free_port()
    config = written(tmp_path, f"[server]\nport = {port}")
    settings = GatewaySettings(config=config, admin_key=SecretStr("k"))
    url, watched = await gateway_process(AsyncExitStack(), settings, tmp_path)
    assert url == f"http://127.0.0.1:{port}"
    assert watched is not None
    (name, argv, log, environment), limit_s = started
    assert (name, log, environment, limit_s) == (
        "gateway", tmp_path / "gateway.log", {"HEADGATE_ADMIN_KEY": "k"}, 1800.0
    )  # fmt: skip
    assert argv[1:] == ["-m", "gateway.cli", "serve", "--config", str(config)]


async def test_another_server_at_the_address_is_not_taken_for_the_gateway(tmp_path: Path) -> None:
    async def nothing(scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body"})

    port = free_port()
    config = written(tmp_path, f"[server]\nport = {port}")
    async with serve(nothing, port), AsyncExitStack() as stack:
        with pytest.raises(GatewayUnreachable, match=f"something listens at http://127.0.0.1:{port}"):
            await gateway_process(stack, GatewaySettings(config=config), tmp_path)


async def test_a_trainer_that_sends_to_engines_has_a_server_that_requires_its_key(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    values = {"transport": "collective", "listen": f"127.0.0.1:{port}", "key": "of-the-weights"}
    async with AsyncExitStack() as stack:
        watched = await weights_process(stack, PublishSettings.model_validate(values), tmp_path / "weights")
        assert watched is not None
        stack.callback(watched.work.close)
        ask = {"backend": "gloo", "workers": 1, "timeout_s": 5}
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            assert (await http.post("/versions/1/send", json=ask)).status_code == 401
            http.headers["Authorization"] = "Bearer of-the-weights"
            response = await http.post("/versions/1/send", json=ask)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "no_version")
            response = await http.post("/versions/1/send", json={**ask, "backend": "smoke"})
            assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_value")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the drivers, which are not run."""
    commands: list[list[str]] = []

    async def start(_name: str, argv: list[str], *_: Any) -> Any:
        commands.append(argv)
        return SimpleNamespace(stop=None)

    monkeypatch.setattr("trainer.loop.children.LocalProcess.start", start)
    monkeypatch.setattr("trainer.loop.children._fail_when_it_ends", lambda process: None)
    return commands


async def test_the_driver_gets_the_runs_seed_its_time_limit_and_where_the_order_is_kept(
    tmp_path: Path, started: list[list[str]]
) -> None:
    for order, name in (("passes", "passes.json"), ("difficulty", "tasks.json")):
        settings = Settings.parse({
            "run": {"dir": tmp_path, "steps": 1, "seed": 7},
            "gateway": {"url": "http://127.0.0.1:1"},
            "model": {"path": tmp_path},
            "optimizer": {"lr": 1e-3},
            "rollout": {"order": order, "agent": "agent:solve", "tasks": tmp_path / "tasks.jsonl", "timeout_s": 30},
        })  # fmt: skip
        await rollout_process(AsyncExitStack(), settings, "http://127.0.0.1:1")
        options = dict(zip(started[-1][6::2], started[-1][7::2], strict=True))
        assert (options["--seed"], options["--timeout"]) == ("7", "30.0")
        assert options["--order-state"] == str(tmp_path / name)


@pytest.mark.parametrize(
    ("reward", "flags"), [("agent", []), ("exit-code", ["--exit-code-reward"]), ("grader", ["--grade"])]
)
async def test_a_command_runs_in_training_and_in_evaluations(
    reward: str, flags: list[str], tmp_path: Path, started: list[list[str]]
) -> None:
    rollout = {"command": ["sh", "agent.sh", "--fast"], "reward": reward, "tasks": "tasks.jsonl"}
    settings = Settings.parse({
        "run": {"dir": str(tmp_path), "steps": 1},
        "gateway": {"url": "http://127.0.0.1:1"},
        "model": {"path": "model"},
        "optimizer": {"lr": 1e-3},
        "rollout": rollout,
        "eval": {"tasks": ["held-out.jsonl"]},
    })  # fmt: skip
    await rollout_process(AsyncExitStack(), settings, "http://127.0.0.1:1")
    assert started[0][-len(flags) - 4 :] == [*flags, "--", "sh", "agent.sh", "--fast"]
    evaluation = Evaluation.of(settings)
    assert (evaluation.command, evaluation.reward) == (("sh", "agent.sh", "--fast"), reward)
    assert isinstance(evaluation.load(), CommandAgent)

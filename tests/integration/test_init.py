"""`gateway init`: its files pass the doctor, serve an agent and train a model; what it cannot use it refuses in one sentence."""

from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.config.settings import Settings
from gateway.engines.fake import create_fake_app
from headgate.processes.ports import free_port
from tests.harness import forks
from tests.harness.gateways import serve
from tests.harness.killed_runs import ScoringEngine

AGENT = """
import asyncio, zlib
import httpx

async def solve(task, base_url, api_key):
    body = {"model": "any", "max_tokens": 8, "messages": [{"role": "user", "content": task["question"]}]}
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=600) as http:
        answer = (await http.post("chat/completions", json=body)).raise_for_status().json()
    return zlib.crc32(answer["choices"][0]["message"]["content"].encode()) / 2**32
"""


async def command(work: Path, module: str, *argv: str) -> tuple[int | None, str]:
    """Run a program in a project's folder, and return its exit status and its output."""
    return await asyncio.to_thread(forks.command, module, *argv, folder=work)


async def test_its_files_pass_the_doctor_serve_and_train(tiny_model: Path, tmp_path: Path) -> None:
    engine, port = ScoringEngine(str(tiny_model)), free_port()
    (tmp_path / "mine.py").write_text(AGENT)
    async with serve(create_fake_app(engine), port):
        options = (
            "--model",
            str(tiny_model),
            "--agent",
            "mine:solve",
            "--engine-url",
            f"http://127.0.0.1:{port}",
        )
        status, output = await command(tmp_path, "gateway.cli", "init", *options, "--reward", "agent")
        assert status == 0, output
        file = tmp_path / "gateway.toml"
        file.write_text(file.read_text().replace("port = 8000", f"port = {free_port()}"))
        status, output = await command(tmp_path, "gateway.cli", "doctor", "gateway.toml")
        assert (status, "0 problems, 0 warnings" in output) == (0, True), output
        changes = [word for change in ("run.steps=1", "run.device=cpu") for word in ("--set", change)]
        status, output = await command(tmp_path, "trainer.cli", "run", "trainer.toml", *changes)
    assert status == 0, output
    (metrics,) = (tmp_path / "runs").rglob("metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["episodes"] == 64
    assert "/console" in output


def test_missing_options_are_prompted_for_and_the_printed_commands_are_complete(
    tiny_model: Path, tmp_path: Path
) -> None:
    answers = f"{tiny_model}\npython agent.py --fast\nexit-code\n"
    done = CliRunner().invoke(app, ["init", "--dir", str(tmp_path)], input=answers)
    assert done.exit_code == 0, done.output
    assert "gateway doctor gateway.toml" in done.output and "trainer run trainer.toml" in done.output
    printed = "gateway episodes run --tasks tasks.jsonl --group-size 8 --forever --exit-code-reward -- python agent.py --fast"
    assert printed in done.output
    trainer = tomllib.loads((tmp_path / "trainer.toml").read_text())
    assert "rollout" not in trainer
    assert (trainer["model"]["lora"]["rank"], trainer["weights"]["transport"]) == (32, "lora")
    before = (tmp_path / "gateway.toml").read_text()
    again = CliRunner().invoke(app, ["init", "--dir", str(tmp_path)], input=answers)
    assert (again.exit_code, "--force replaces them" in again.output) == (2, True)
    assert (tmp_path / "gateway.toml").read_text() == before
    full = CliRunner().invoke(app, ["init", "--dir", str(tmp_path / "full"), "--full"], input=answers)
    assert full.exit_code == 0, full.output
    assert "lora" not in tomllib.loads((tmp_path / "full" / "trainer.toml").read_text())["model"]


def test_without_a_terminal_the_reward_is_the_agents(tiny_model: Path, tmp_path: Path) -> None:
    options = ["--dir", str(tmp_path), "--model", str(tiny_model), "--agent", "no-such-program x"]
    done = CliRunner().invoke(app, ["init", *options, "--engine-python", "/none/python"])
    assert (done.exit_code, (tmp_path / "gateway.toml").exists()) == (0, True), done.output
    assert "warning: --agent: no-such-program: no such program here" in done.output
    assert "warning: [engine] python = '/none/python' has no vLLM" in done.output


@pytest.mark.parametrize(("reward", "key"), [("mine:grade", "function"), ("http://127.0.0.1:9/grade", "url")])
def test_a_grader_is_one_of_the_gateways(tiny_model: Path, tmp_path: Path, reward: str, key: str) -> None:
    options = [
        "init",
        "--dir",
        str(tmp_path),
        "--model",
        str(tiny_model),
        "--agent",
        "python agent.py",
        "--reward",
        reward,
    ]
    done = CliRunner().invoke(app, options)
    assert (done.exit_code, "--grade" in done.output) == (0, True), done.output
    grader = Settings.load(tmp_path / "gateway.toml").graders["reward"]
    assert getattr(grader, key) == reward


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--model", "Qwen/Qwen3-0.6B", "--agent", "x"], "hf download Qwen/Qwen3-0.6B"),
        (["--model", "{empty}", "--agent", "x"], "has no tokenizer.json"),
        (["--model", "{model}", "--agent", "x", "--reward", "yes"], "use agent, exit-code"),
        (["--model", "{model}", "--agent", "a:b", "--reward", "exit-code"], "is for a command"),
    ],
)
def test_an_unusable_option_is_refused_in_one_sentence(
    tiny_model: Path, tmp_path: Path, options: list[str], reason: str
) -> None:
    (tmp_path / "empty").mkdir()
    filled = [option.format(empty=tmp_path / "empty", model=tiny_model) for option in options]
    done = CliRunner().invoke(app, ["init", "--dir", str(tmp_path), "--reward", "agent", *filled])
    (line,) = done.output.strip().splitlines()
    assert (done.exit_code, reason in line) == (2, True), line
    assert not (tmp_path / "gateway.toml").exists()

"""`gateway init`: its file passes the doctor, serves an agent and trains a model; a mistake of the agent shows before that."""

from __future__ import annotations

import asyncio
import json
import shutil
import tomllib
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli import app
from gateway.cli.init import inputs
from gateway.config.settings import Settings
from gateway.engines.fake import create_fake_app
from headgate.processes.ports import free_port
from tests.harness import forks
from tests.harness.forked_programs import forked
from tests.harness.gateways import serve
from tests.harness.killed_runs import ScoringEngine

AGENT = """
import zlib
import httpx

async def solve(task, base_url, api_key):
    body = {"model": "any", "max_tokens": 8, "messages": [{"role": "user", "content": task["question"]}]}
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=600) as http:
        answer = (await http.post("chat/completions", json=body)).raise_for_status().json()
    return zlib.crc32(answer["choices"][0]["message"]["content"].encode()) / 2**32
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
async def environ(project: Path) -> AsyncIterator[dict[str, str]]:
    """The environment in which the programs that a command starts are forked."""
    async with forked(project / "forks") as found:
        yield found


def init(*options: str, answers: str = "", environ: Mapping[str, str] | None = None) -> Result:
    return CliRunner(env={"COLUMNS": "200", **(environ or {})}).invoke(app, ["init", *options], input=answers)


async def tried(environ: dict[str, str], *options: str) -> Result:
    """Run `gateway init` with its trial, for which it starts a gateway."""
    return await asyncio.to_thread(partial(init, *options, environ=environ))


async def command(work: Path, environ: dict[str, str], module: str, *argv: str) -> str:
    """Run a program in a project's folder, as a person there would, and return its output."""
    running = partial(forks.command, module, *argv, folder=work, environ=environ)
    status, output = await asyncio.to_thread(running)
    assert status == 0, output
    return output


async def test_its_one_file_passes_the_doctor_serves_evaluates_and_trains(
    tiny_model: Path, project: Path, environ: dict[str, str]
) -> None:
    engine, port = ScoringEngine(str(tiny_model)), free_port()
    (project / "mine.py").write_text(AGENT)
    async with serve(create_fake_app(engine), port):
        run = partial(command, project, environ)
        where = ["--model", str(tiny_model), "--engine-url", f"http://127.0.0.1:{port}"]
        output = await run("gateway.cli", "init", "--agent", "mine:solve", *where)
        assert "1 call of the agent, reward 0." in output
        assert output.splitlines()[-1] == "next:    trainer run run.toml"
        file = project / "run.toml"
        file.write_text(file.read_text().replace("port = 8000", f"port = {free_port()}"))
        assert "0 problems, 0 warnings" in await run("gateway.cli", "doctor", "run.toml")
        changes = [word for change in ("run.steps=1", "run.device=cpu") for word in ("--set", change)]
        output = await run("trainer.cli", "run", "run.toml", *changes)
    (metrics,) = (project / "runs").rglob("metrics.jsonl")
    assert (metrics.parent / "tokens" / "step-000001.parquet").is_file()
    used = json.loads((metrics.parent / "trainer-settings.json").read_text())["settings"]
    (steps,) = (row for row in used if row["name"] == "run.steps")
    assert (steps["value"], steps["changed"]) == (1, True)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["episodes"] for line in lines if "episodes" in line and "lr" in line] == [64]
    assert "/console" in output


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("print(1.0)", "the agent called no model of this gateway"),
        ("import os; os.environ['MY_TOKEN']", "ended with 1: KeyError: 'MY_TOKEN'"),
    ],
)
async def test_a_mistake_of_the_agent_is_reported_before_anything_is_trained(
    tiny_model: Path, project: Path, environ: dict[str, str], program: str, problem: str
) -> None:
    (project / "agent.py").write_text(program)
    done = await tried(environ, "--model", str(tiny_model), "--agent", "python agent.py")
    assert done.exit_code == 1, done.output
    assert "fix the agent first: " in done.output and problem in done.output
    assert (project / "run.toml").exists(), "the file does not depend on the agent's mistake"


async def test_an_environment_of_others_takes_the_place_of_agent_tasks_and_reward(
    tiny_model: Path, project: Path, environ: dict[str, str]
) -> None:
    options = ["--model", str(tiny_model), "--env", "fake:a"]
    done = await tried(environ, *options, "--env-args", '{"size": 100}')
    assert done.exit_code == 0, done.output
    assert "1 call of the agent, reward 0" in done.output
    rollout = tomllib.loads((project / "run.toml").read_text())["rollout"]
    assert (rollout["env"], rollout["env_args"], "tasks" in rollout) == ("fake:a", {"size": 100}, False)
    assert not (project / "tasks.jsonl").exists()
    done = await tried(environ, *options, "--force", "--env-args", '{"fails": 1}')
    assert (done.exit_code, "the fake tool server is down" in done.output) == (1, True), done.output


def test_it_asks_for_what_no_option_states(tiny_model: Path, project: Path) -> None:
    answers = f"{tiny_model}\npython agent.py --fast\nexit-code\ntasks.jsonl\n"
    done = init("--no-trial", answers=answers)
    assert done.exit_code == 0, done.output
    written = tomllib.loads((project / "run.toml").read_text())
    rollout = written["rollout"]
    assert (rollout["command"], rollout["reward"]) == (["python", "agent.py", "--fast"], "exit-code")
    assert (written["model"]["lora"]["rank"], written["publish"]["transport"]) == (32, "lora")
    assert written["eval"]["tasks"] == ["held-out.jsonl"]
    again = init("--no-trial", answers=answers)
    assert (again.exit_code, "--force replaces it" in again.output) == (2, True)
    full = init("--no-trial", "--force", "--full", answers=answers)
    assert full.exit_code == 0, full.output
    assert "lora" not in tomllib.loads((project / "run.toml").read_text())["model"]


def test_without_a_terminal_it_uses_defaults_and_prints_them(tiny_model: Path) -> None:
    options = ["--model", str(tiny_model), "--engine-python", "/none/python"]
    done = init(*options, "--agent", "no-such-program x")
    assert done.exit_code == 1
    for line in ("[agent]: agent", "[tasks.jsonl]: tasks.jsonl", "no-such-program: no such program"):
        assert line in done.output
    assert "warning: [engine] python = '/none/python' has no vLLM" in done.output
    done = init(*options, "--force")
    assert (done.exit_code, "--agent is needed: there is no terminal" in done.output) == (2, True)


def test_a_model_of_the_hub_is_downloaded(
    tiny_model: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(command: list[str]) -> bool:
        assert command == ["hf", "download", "some/model", "--local-dir", "models/model"]
        shutil.copytree(tiny_model, "models/model")
        return True

    monkeypatch.setattr(inputs, "_downloaded", download)
    done = init("--no-trial", "--model", "some/model", "--agent", "x")
    assert done.exit_code == 0, done.output
    assert Settings.load(project / "run.toml").models["model"].path == Path("models/model")
    monkeypatch.setattr(inputs, "_downloaded", lambda command: False)
    done = init("--no-trial", "--force", "--model", "some/other", "--agent", "x")
    assert (done.exit_code, "the download failed" in done.output) == (2, True)


@pytest.mark.parametrize(("reward", "key"), [("mine:grade", "function"), ("http://127.0.0.1:9/grade", "url")])
def test_a_grader_is_one_of_the_gateways(tiny_model: Path, project: Path, reward: str, key: str) -> None:
    done = init("--no-trial", "--model", str(tiny_model), "--agent", "python a.py", "--reward", reward)
    assert done.exit_code == 0, done.output
    written = tomllib.loads((project / "run.toml").read_text())
    assert (written["graders"]["reward"][key], written["rollout"]["reward"]) == (reward, "grader")


def test_an_agent_in_daily_use_has_a_lasting_key_and_no_rollout(tiny_model: Path, project: Path) -> None:
    result = init("--model", str(tiny_model), "--live", "--reward", "rewards:satisfied")
    assert result.exit_code == 0, result.output
    settings = Settings.load(project / "run.toml")
    agent = settings.agents["live"]
    assert (agent.live, agent.mode, agent.group_size) == (True, "train", 1)
    assert f"OPENAI_API_KEY={agent.key.get_secret_value()}" in result.output
    assert "[rollout]" not in (project / "run.toml").read_text()
    refused = init("--model", str(tiny_model), "--live", "--reward", "agent", "--force")
    assert (refused.exit_code, "--live needs a grader" in refused.output) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "./none/Qwen3-0.6B", "--agent", "x"], "hf download ORGANIZATION/Qwen3-0.6B"),
        (["--model", "{empty}", "--agent", "x"], "has no tokenizer.json"),
        (["--model", "{model}", "--agent", "x", "--reward", "yes"], "use agent, exit-code"),
        (["--model", "{model}", "--agent", "a:b", "--reward", "exit-code"], "is for a command"),
        (["--model", "{model}", "--env", "nothing:x"], "with one of verifiers"),
        (["--model", "{model}", "--env", "fake:a", "--env-args", "[]"], "--env-args is a JSON object"),
        (["--model", "{model}", "--agent", "x", "--tasks", "none.jsonl"], "--tasks none.jsonl: no such file"),
        (
            ["--model", "{model}", "--agent", "x", "--held-out", "none.jsonl"],
            "--held-out none.jsonl: no such",
        ),
    ],
)
def test_what_cannot_be_used_is_reported_in_one_sentence(
    tiny_model: Path, project: Path, options: list[str], message: str
) -> None:
    (project / "empty").mkdir()
    filled = [option.format(empty=project / "empty", model=tiny_model) for option in options]
    defaults = [] if "--tasks" in options else ["--tasks", "tasks.jsonl"]
    done = init(*([] if "--env" in options else ["--reward", "agent", *defaults]), *filled)
    (line,) = done.output.strip().splitlines()
    assert (done.exit_code, message in line) == (2, True), line
    assert not (project / "run.toml").exists()

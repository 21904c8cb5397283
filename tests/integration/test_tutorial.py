"""The commands of docs/guide/tutorial.md, typed one after the other: an agent, its tasks, a model, one file, training.

The engine is not vLLM, but one that is started without delay: `gateway init --engine-url` names it.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from examples.calculator import teacher
from examples.demo.tasks import tasks
from gateway.cli import app
from gateway.cli.init import inputs
from gateway.cli.init.machine import Machine
from gateway.config.settings import Settings
from gateway.engines.fake import create_fake_app
from headgate.processes.ports import free_port
from tests.harness import forks
from tests.harness.demos import play, small_model
from tests.harness.fences import ROOT, fences
from tests.harness.forked_programs import forked
from tests.harness.gateways import serve
from tests.harness.model_engine import ModelEngine
from tests.harness.records import nodes_of
from tests.harness.scripted import scripted_gateway
from trainer.config.settings import Settings as TrainerSettings
from trainer.data.conversations import Rows, sampled_text

RECIPE = ROOT / "examples" / "calculator" / "warmstart.toml"
SMALL = re.sub("(steps|rows|layers) = .*", r"\1 = 1", RECIPE.read_text()) + "hidden = 32\nintermediate = 32\n"
PROGRAMS = {"gateway": "gateway.cli", "trainer": "trainer.cli"}
REWARD = "eval/reward_mean"
RISE = 0.3
"""Measured on vLLM: 0.92."""


def commands(*, gpu: bool) -> list[list[str]]:
    """The page's commands, for a GPU or for the CPU, in their order."""
    blocks = [
        fence.body.replace("\\\n", "")
        for fence in fences(ROOT / "docs" / "guide" / "tutorial.md")
        if fence.kind == "sh" and (fence.why_not == "needs a GPU") == gpu
    ]
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


async def typed(argv: list[str], folder: Path, environ: dict[str, str]) -> str:
    """Run a command as a reader does, and return its output."""
    if argv[0] == "python":
        done = await asyncio.to_thread(subprocess.run, [sys.executable, *argv[1:]], check=False)
        status, output = done.returncode, ""
    else:
        program = partial(forks.command, PROGRAMS[argv[0]], *argv[1:], folder=folder, environ=environ)
        status, output = await asyncio.to_thread(program)
    assert status == 0, f"{shlex.join(argv)}\n{output}"
    return output


async def follow(folder: Path, small: bool) -> None:
    """Type the page's commands. `small`: with few tasks, a model that has learned nothing, and a dry run in place of training."""
    port = free_port()
    changes = {"init": ["--engine-url", f"http://127.0.0.1:{port}"]}
    if small:
        (folder / "small.toml").write_text(SMALL)
        changes["warmstart"] = ["--recipe", "small.toml"]
        changes["examples.demo.tasks"] = ["--count", "8"]
        changes["run"] = ["--dry-run"]
    todo = [[*argv, *changes.get(argv[2 if argv[0] == "python" else 1], [])] for argv in commands(gpu=False)]
    made = next(place for place, argv in enumerate(todo, 1) if "warmstart" in argv)
    async with forked(folder / "forks") as environ:
        for argv in todo[:made]:
            await typed(argv, folder, environ)
        async with serve(create_fake_app(ModelEngine(str(folder / "models" / "calculator"))), port):
            for argv in todo[made:]:
                output = await typed(argv, folder, environ)
                if "init" in argv:
                    assert "1 call of the agent, reward 0" in output
                    file = folder / "run.toml"
                    file.write_text(file.read_text().replace("port = 8000", f"port = {free_port()}"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: that of the repository, as far as the page needs it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_its_commands_lead_from_an_agent_to_a_run_that_can_start(project: Path) -> None:
    await follow(project, small=True)


@pytest.mark.long
@pytest.mark.timeout(7200)
async def test_its_reward_rises(project: Path) -> None:
    await follow(project, small=False)
    lines = (project / "runs" / "calculator" / "trainer" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = (line[REWARD] for line in map(json.loads, lines) if REWARD in line)
    assert last - first > RISE


def test_its_commands_for_a_gpu_write_files_that_both_programs_load(
    tiny_model: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "this_machine", lambda: Machine(1, "NVIDIA H100 80GB HBM3", 79.6))
    (project / "tasks").mkdir()
    for name in ("train", "held-out"):
        (project / "tasks" / f"{name}.jsonl").write_text('{"task_id": "t"}\n')
    adapters = []
    for argv in commands(gpu=True):
        if argv[:2] == ["gateway", "init"]:
            argv[argv.index("--model") + 1] = str(tiny_model)
            done = CliRunner().invoke(app, [*argv[1:], "--no-trial"])
            assert done.exit_code == 0, done.output
            Settings.load(project / "run.toml")
            adapters.append(TrainerSettings.load(project / "run.toml").model.lora is not None)
        else:
            assert argv[:3] == ["trainer", "run", "run.toml"]
    assert adapters == [False, True]


async def test_the_teacher_shows_what_the_agent_sends_and_the_tool_returns(
    project: Path, tmp_path: Path
) -> None:
    model = small_model(RECIPE, tmp_path)
    task = next(tasks("train", 1))
    for guess, calls in ((None, 1), (99, 0)):
        example = teacher.conversation(task, guess)
        replies = [
            sampled_text(message).removesuffix("<|im_end|>")
            for message in example["messages"]
            if message["role"] == "assistant"
        ]
        async with scripted_gateway(model, tmp_path / str(calls)) as (gateway, engine):
            outcome = await play(gateway, engine, "examples.calculator.agent:solve", task, replies)
            assert (outcome.reward, outcome.components) == (float(guess is None), {"tool_calls": calls})
            nodes = await nodes_of(gateway, str(outcome.episode_id))
            ids, _ = Rows(Tokenizer.from_file(str(model / "tokenizer.json"))).row(example)
            assert [token for node in nodes for token in node["ids"]] == ids

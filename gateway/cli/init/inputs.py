"""What `gateway init` receives, by options or answers, and the project that it makes of them."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from gateway.cli.init.machine import this_machine
from gateway.cli.init.project import FUNCTION, Environment, LiveAgent, OwnAgent, Project
from gateway.cli.run_options import env_arguments
from gateway.config import ModelSettings
from gateway.config.settings import ConfigError
from gateway.render.model_folder import check_model
from headgate.client.agents import read_tasks
from headgate.environments import parse
from headgate.weights.folders import weight_bytes

TASKS, _HELD_OUT = Path("tasks.jsonl"), Path("held-out.jsonl")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONTEXT = {"cpu": 2048, "gpu": 8192}
"""Tokens of a conversation, where the model takes as many."""
_FAMILIES = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "glm4_moe": "glm-4.5", "deepseek_v3": "deepseek-v3"}
"""Families of templates by the `model_type` of a checkpoint; of others, the checkpoint's own template is used."""


def answer(question: str, flag: str, default: str | None = None) -> str:
    """Ask; without a terminal, return the default, which is printed. Raise ConfigError if there is none."""
    try:
        return str(typer.prompt(question, default=default)).strip()
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        typer.echo(default or "")
        if default is None:
            raise ConfigError(f"{flag} is needed: there is no terminal to ask at") from None
        return default


def checkpoint(model: str) -> Path:
    """Return the folder of a model; one of the hub is downloaded to models/. Raise ConfigError."""
    given = Path(model).expanduser()
    if given.is_dir():
        return given
    folder = Path("models", given.name)
    download = ["hf", "download", model, "--local-dir", str(folder)]
    if not _HUB_ID.fullmatch(model) or given.parent.is_dir():
        raise ConfigError(
            f"--model {model}: no such folder; `hf download ORGANIZATION/{given.name} --local-dir {folder}` downloads a model"
        )
    if (folder / "config.json").is_file():
        typer.echo(f"model:   {folder}, which is there already")
        return folder
    typer.echo(f"model:   downloading {model} to {folder}")
    if not _downloaded(download):
        command = shlex.join(download)
        raise ConfigError(
            f"--model {model}: the download failed; once `{command}` succeeds, use --model {folder}"
        )
    return folder


def _downloaded(command: list[str]) -> bool:
    """Run the hub's program, which prints its progress and errors. Return whether it succeeded."""
    program = shutil.which(command[0], path=str(Path(sys.executable).parent)) or shutil.which(command[0])
    return program is not None and subprocess.run([program, *command[1:]], check=False).returncode == 0


def task_files(tasks: Path, held_out: Path | None, *, example: bool) -> tuple[Path | None, dict[Path, str]]:
    """Return the file of tasks for evaluation, and the example files that are to be written. Raise ConfigError or ValueError."""
    examples: dict[Path, str] = {}
    if example and not tasks.exists():
        examples[tasks] = _sums(2, 34)
        if held_out is None and not _HELD_OUT.exists():
            examples[_HELD_OUT] = _sums(34, 42)
    if held_out is None and (_HELD_OUT.exists() or examples):
        held_out = _HELD_OUT
    for flag, path in (("--tasks", tasks), ("--held-out", held_out)):
        if path is None or path in examples:
            continue
        if not path.is_file():
            raise ConfigError(f"{flag} {path}: no such file")
        if not read_tasks(path):
            raise ConfigError(
                f"{flag} {path}: the file has no tasks: write one JSON object with a task_id on each line"
            )
    return held_out, examples


def _sums(first: int, end: int) -> str:
    rows = [
        {"task_id": f"sum-{n}", "question": f"What is {n} + {2 * n + 1}?", "answer": str(3 * n + 1)}
        for n in range(first, end)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def own_agent(
    agent: str | None, reward: str | None, tasks: Path | None, held_out: Path | None
) -> tuple[OwnAgent, dict[Path, str]]:
    """Return the user's agent, after questions for what is None, and the example files to write. Raise ConfigError."""
    agent = agent or answer("Your agent: a command that runs it once, or module:function", "--agent")
    reward = reward or answer(
        "Its reward: agent (what it prints or returns), exit-code, module:function or URL",
        "--reward",
        "agent",
    )
    tasks = tasks or Path(answer("The file of its tasks", "--tasks", str(TASKS)))
    held_out, files = task_files(tasks, held_out, example=tasks == TASKS)
    own = OwnAgent(agent, reward, tasks, held_out)
    if own.grader and not _is_grader(reward):
        raise ConfigError(f"--reward {reward}: use agent, exit-code, module:function, or a URL")
    if reward == "exit-code" and own.is_function:
        raise ConfigError("--reward exit-code is for a command: a function returns its reward")
    if not own.is_function and not shlex.split(agent):
        raise ConfigError("--agent is empty: name a command or module:function")
    return own, files


def live_agent(reward: str | None, excluded: Mapping[str, object]) -> LiveAgent:
    """Return an agent in daily use. `excluded`: options without a meaning for it, with their values. Raise ConfigError."""
    if named := [flag for flag, value in excluded.items() if value is not None]:
        raise ConfigError(f"--live has no tasks and starts no agent: leave out {', '.join(named)}")
    question = "Its grader, which sees each reply and what followed: module:function or a URL"
    reward = reward or answer(question, "--reward")
    if not _is_grader(reward):
        raise ConfigError(f"--reward {reward}: --live needs a grader: module:function, or a URL")
    return LiveAgent(reward, f"hg-live-{secrets.token_urlsafe(24)}")


def _is_grader(reward: str) -> bool:
    return bool(FUNCTION.fullmatch(reward)) or reward.startswith(("http://", "https://"))


def environment_of(name: str, args: str, python: Path | None, excluded: Mapping[str, object]) -> Environment:
    """Return the environment. `excluded`: options that it replaces, with their values. Raise ConfigError or ValueError."""
    if named := [flag for flag, value in excluded.items() if value is not None]:
        raise ConfigError(f"--env has an agent, tasks and rewards of its own: leave out {', '.join(named)}")
    parse(name)
    return Environment(name, env_arguments(args), python)


def project_of(
    model: Path, source: OwnAgent | Environment | LiveAgent, engine: dict[str, str], lora: bool
) -> Project:
    """Return the project of the options. Raise ConfigError for what cannot be one."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", model.resolve().name).strip("-_") or "model"
    check_model(name, ModelSettings(path=model, family="template"), loaded=True)
    config = json.loads((model / "config.json").read_text())
    family, machine = _FAMILIES.get(config.get("model_type", ""), "template"), this_machine()
    context = min(_CONTEXT["gpu" if machine.gpus else "cpu"], _longest(config))
    weights_gib = weight_bytes(model) / 2**30
    return Project(name, model, family, context, source, engine, machine, lora, weights_gib)


def _longest(config: dict[str, Any]) -> int:
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) else min(_CONTEXT.values())


def engine_of(url: str | None, python: str | None) -> dict[str, str]:
    """Return the keys of `[engine]` that locate it."""
    if url is not None:
        return {"launch": "external", "url": url}
    found = (
        name for name in (".venv-engine-gpu/bin/python", ".venv-engine/bin/python") if Path(name).exists()
    )
    return {"launch": "vllm", "python": python or next(found, sys.executable)}

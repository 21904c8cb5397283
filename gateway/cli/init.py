"""`gateway init`: the files of a new project, from a model, an agent and a reward."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

_FUNCTION = re.compile(r"[\w./-]+:\w+")
_REWARD = "Its reward: agent (what it prints or returns), exit-code, module:function, or a URL"
_GROUP = 8
_TASKS = [("1", "What is 2 + 3?", "5"), ("2", "What is 7 - 4?", "3"), ("3", "What is 6 * 2?", "12")]
_ENGINES = (Path(".venv-engine-gpu/bin/python"), Path(".venv-engine/bin/python"))
_RANK = 32
_LORA_LR, _FULL_LR = 1e-5, 1e-6
"""Adapters take about ten times the learning rate of full training."""
_CONTEXT = 4096
"""Tokens of a conversation, where the model takes as many."""
_FAMILIES = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "glm4_moe": "glm-4.5", "deepseek_v3": "deepseek-v3"}
"""Families of templates by the `model_type` of a checkpoint; of others, the checkpoint's own template is used."""


@dataclass(frozen=True, slots=True)
class Project:
    """The model, agent and reward that the files are written for."""

    name: str
    model: Path
    family: str
    context: int
    """Tokens of a conversation."""
    agent: str
    reward: str
    """`agent`, `exit-code`, or a grader: `module:function` or a URL."""
    engine: dict[str, str]
    """The keys of `[engine]` that locate it."""
    lora: bool = True
    """Train adapters, which engines load next to the model's weights, instead of all weights."""

    @property
    def is_function(self) -> bool:
        """True if the agent is a function, and no command."""
        return _FUNCTION.fullmatch(self.agent) is not None

    @property
    def trained_by_trainer(self) -> bool:
        """True if the trainer can run the agent itself: a function of a module."""
        return self.is_function and "/" not in self.agent and ".py:" not in self.agent

    @property
    def grader(self) -> str:
        """The grader that computes the reward in the gateway; empty if the agent does."""
        return "" if self.reward in ("agent", "exit-code") else self.reward


def init(
    model: Annotated[
        Path,
        typer.Option(prompt="Folder of the model's checkpoint", help="A Hugging Face checkpoint's folder."),
    ],
    agent: Annotated[
        str,
        typer.Option(
            prompt="Your agent: a command that runs it once, or module:function",
            help="A command that runs it once per episode, such as 'python agent.py'; or an async module:function.",
        ),
    ],
    reward: Annotated[
        str | None,
        typer.Option(
            help="`agent`: the last line that it prints, or what it returns; `exit-code`; or a grader, module:function or a URL."
            " [default: agent]",
        ),
    ] = None,
    directory: Annotated[
        Path, typer.Option("--dir", help="The folder to write to.", file_okay=False)
    ] = Path(),
    engine_url: Annotated[
        str | None, typer.Option(help="An engine that runs already. [default: the gateway starts vLLM]")
    ] = None,
    engine_python: Annotated[
        str | None,
        typer.Option(help="The interpreter of vLLM's environment. [default: the first that is found]"),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora/--full", help="Train LoRA adapters, or all weights of the model.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write gateway.toml, trainer.toml and an example of tasks for your model and agent, and print what to run next.

    Prompts for what no option sets.

    Example:

      gateway init --model models/Qwen3-0.6B --agent "python agent.py" --reward exit-code
    """
    from gateway.config.settings import ConfigError

    try:
        reward = reward or _prompt_for_reward()
        project = _project(model, agent, reward, _engine(engine_url, engine_python), lora)
        warnings = _warnings(project)
        files = {
            "gateway.toml": gateway_toml(project),
            "trainer.toml": trainer_toml(project),
            "tasks.jsonl": _tasks(),
        }
        existing = [name for name in files if (directory / name).exists()]
        if existing and not force:
            raise ConfigError(
                f"{', '.join(existing)}: there already in {directory.resolve()}; --force replaces them"
            )
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(next_steps(project, directory))


def _prompt_for_reward() -> str:
    """Ask for the reward; without a terminal, and so without an answer, it is the default."""
    try:
        return str(typer.prompt(_REWARD, default="agent"))
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        typer.echo("agent")
        return "agent"


def _warnings(project: Project) -> list[str]:
    """Return what keeps the files from working on this machine now."""
    found = []
    program = shlex.split(project.agent)[0] if not project.is_function else ""
    if program and shutil.which(program) is None:
        found.append(f"--agent: {program}: no such program here")
    python = project.engine.get("python")
    if python is not None and not _has_vllm(python):
        found.append(
            f"[engine] python = {python!r} has no vLLM: install it there, or name another with --engine-python"
        )
    return found


def _has_vllm(python: str) -> bool:
    script = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", script], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _project(model: Path, agent: str, reward: str, engine: dict[str, str], lora: bool) -> Project:
    """Return the project of the options. Raise ConfigError for what cannot be one."""
    from gateway.config import ModelSettings
    from gateway.config.settings import ConfigError
    from gateway.render.renderer import check_model

    if not model.is_dir():
        way = f"`hf download {model} --local-dir models/{model.name}` gets one of Hugging Face"
        raise ConfigError(f"--model {model}: no such folder; {way}")
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", model.resolve().name).strip("-_") or "model"
    check_model(name, ModelSettings(path=model, family="template"), loaded=True)
    config = json.loads((model / "config.json").read_text())
    family = _FAMILIES.get(config.get("model_type", ""), "template")
    project = Project(name, model, family, min(_CONTEXT, _longest(config)), agent, reward, engine, lora)
    if project.grader and not (_FUNCTION.fullmatch(reward) or reward.startswith(("http://", "https://"))):
        raise ConfigError(f"--reward {reward}: use agent, exit-code, module:function, or a URL")
    if reward == "exit-code" and project.is_function:
        raise ConfigError("--reward exit-code is for a command: a function returns its reward")
    return project


def _longest(config: dict[str, Any]) -> int:
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) else _CONTEXT


def _engine(url: str | None, python: str | None) -> dict[str, str]:
    if url is not None:
        return {"launch": "external", "url": url}
    found = (str(each) for each in _ENGINES if each.exists())
    return {"launch": "vllm", "python": python or next(found, sys.executable)}


def gateway_toml(project: Project) -> str:
    """Return the gateway's file."""
    grader = ""
    if project.grader:
        key = "url" if "://" in project.grader else "function"
        grader = "\n[graders.reward]                    # called when an episode is closed without a reward\n"
        grader += f"{key} = {_quoted(project.grader)}\n"
    engine = "\n".join(f"{key} = {_quoted(value)}" for key, value in project.engine.items())
    if project.lora:
        engine += f"""
transport = "lora"                  # versions are adapters, next to the model's own weights
max_lora_rank = {_RANK}                  # [model.lora] rank of the trainer"""
    return f"""# The gateway: agents ask it, engines sample for it, and every token is recorded.
[server]
port = 8000

[models.{project.name}]
path = {_quoted(str(project.model))}
family = "{project.family}"
aliases = ["*"]                     # unmodified agents request models by names of their own
max_model_len = {project.context}

[engine]
{engine}
log = "runs/{project.name}/engine.log"

[sampling]                          # in training episodes only
temperature = {{ override = 1.0 }}    # agents that request temperature 0 teach nothing
top_p = {{ override = 1.0 }}
seed = "ignore"

[staleness]
eta = 1                             # a batch may be sampled by the version before, too
batch = 8                           # groups
{grader}
[store]
url = "sqlite:///runs/{project.name}/gateway.db"

[control]
recording = "runs/{project.name}/control.jsonl"
"""


def trainer_toml(project: Project) -> str:
    """Return the trainer's file, which starts the gateway."""
    rollout = f"""
[rollout]                           # the trainer runs the agent itself
agent = {_quoted(project.agent)}
tasks = "tasks.jsonl"
group_size = {_GROUP}
concurrency = 32
"""
    lora = f"""
[model.lora]                        # adapters are trained; `gateway init --full` trains all weights
rank = {_RANK}
alpha = {2 * _RANK}

[weights]
transport = "lora"                  # versions are adapters: merged into bfloat16, most of what early steps learn is rounded away
"""
    return f"""# The trainer: starts the gateway, learns from its batches, publishes each version to the engines.
[run]
dir = "runs/{project.name}/trainer"
steps = 100

[gateway]
config = "gateway.toml"

[model]
path = {_quoted(str(project.model))}
{lora if project.lora else ""}
[algorithm]
type = "grpo"

[optimizer]
lr = {_LORA_LR if project.lora else _FULL_LR:g}

[batch]
tokens = {max(8192, project.context)}
{rollout if project.trained_by_trainer else ""}"""


def next_steps(project: Project, directory: Path) -> str:
    """Return the message about what was written and which commands follow."""
    lines = [
        f"wrote gateway.toml, trainer.toml and tasks.jsonl, an example: put your tasks there ({directory.resolve()})",
        "check:  gateway doctor gateway.toml",
        "train:  trainer run trainer.toml",
    ]
    if project.lora and project.engine["launch"] == "external":
        lines.append(
            f"engine: start vLLM with `--enable-lora --max-lora-rank {_RANK}`; docs/topics/weights.md has the other options"
        )
    if not project.trained_by_trainer:
        lines.append(f"agents: {episodes_command(project)}      (in another terminal)")
    return "\n".join(lines)


def episodes_command(project: Project) -> str:
    """Return the command that runs the agent once per episode."""
    words = ["gateway", "episodes", "run", "--tasks", "tasks.jsonl", "--group-size", str(_GROUP), "--forever"]
    if project.is_function:
        return shlex.join([*words, "--agent", project.agent])
    reward = "--exit-code-reward" if project.reward == "exit-code" else "--grade" if project.grader else ""
    return shlex.join([*words, *filter(None, [reward]), "--", *shlex.split(project.agent)])


def _tasks() -> str:
    rows = [
        {"task_id": f"example-{number}", "question": question, "answer": answer}
        for number, question, answer in _TASKS
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _quoted(text: str) -> str:
    """Return a TOML string."""
    return json.dumps(text, ensure_ascii=False)

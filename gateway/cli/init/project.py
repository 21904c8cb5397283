"""The one file that `gateway init` writes for a project, which `trainer run` and `gateway serve` both read. Pure."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.cli.init.machine import Machine
from scheduler.cluster.sharing import engine_args

FILE = "run.toml"
FUNCTION = re.compile(r"[\w./-]+:\w+")
_BARE = re.compile(r"[\w-]+", re.ASCII)
_ENV_TASKS, _ENV_EVALUATED = 2000, 100
RANK = 32
_LORA_LR, _FULL_LR = 1e-5, 1e-6
"""Adapters take about ten times the learning rate of full training."""
_SHARE = 0.4
"""Of the only GPU, for the engine; the trainer needs the rest."""
_SOURCES = ("agent", "exit-code")
"""Rewards that come from the agent; any other is a grader."""


@dataclass(frozen=True, slots=True)
class OwnAgent:
    """An agent of the user's, with a file of tasks."""

    agent: str
    """A command, or `module:function`."""
    reward: str
    """`agent`, `exit-code`, or a grader: `module:function` or a URL."""
    tasks: Path
    held_out: Path | None
    """Tasks for evaluation."""

    @property
    def is_function(self) -> bool:
        """True if the agent is a function, and not a command."""
        return FUNCTION.fullmatch(self.agent) is not None

    @property
    def grader(self) -> str:
        """The grader that computes the reward in the gateway; empty if the agent does."""
        return "" if self.reward in _SOURCES else self.reward

    @property
    def reward_source(self) -> str:
        """The value of `[rollout] reward`."""
        return self.reward if self.reward in _SOURCES else "grader"

    def rollout(self) -> list[str]:
        """Return the keys of `[rollout]` that name the agent and its tasks."""
        if self.is_function:
            lines = [f"agent = {_toml(self.agent)}"]
        else:
            lines = [f"command = {_toml(shlex.split(self.agent))}"]
            if self.reward_source != "agent":
                lines.append(f"reward = {_toml(self.reward_source)}")
        return [*lines, f"tasks = {_toml(self.tasks)}"]

    def evaluation(self) -> list[str] | None:
        """Return the keys of `[eval]` that name the held-out tasks; None if there are none."""
        return None if self.held_out is None else [f"tasks = [{_toml(self.held_out)}]"]


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment of others, with an agent, tasks and rewards of its own."""

    name: str
    """`KIND:NAME`."""
    args: dict[str, Any] = field(default_factory=dict)
    python: Path | None = None
    grader = ""

    def rollout(self) -> list[str]:
        """Return the keys of `[rollout]` that name the environment."""
        lines = [f"env = {_toml(self.name)}"]
        lines += [f"env_args = {_toml(self.args)}"] if self.args else []
        lines += [f"env_python = {_toml(self.python)}"] if self.python else []
        return [*lines, f"env_tasks = {_ENV_TASKS}                    # at most, for training"]

    def evaluation(self) -> list[str]:
        """Return the keys of `[eval]` for the tasks that the environment holds out."""
        return [
            f"env_tasks = {_ENV_EVALUATED}                     # at most, of those that the environment holds out"
        ]


@dataclass(frozen=True, slots=True)
class LiveAgent:
    """An agent that people use already: it calls the gateway with a lasting key."""

    grader: str
    """`module:function` or a URL."""
    key: str = field(repr=False)

    def rollout(self) -> None:
        """Return nothing: the trainer runs no agent."""

    def evaluation(self) -> None:
        """Return nothing: there are no tasks."""


@dataclass(frozen=True, slots=True)
class Project:
    """The model, agent and machine that the file is written for."""

    name: str
    model: Path
    family: str
    context: int
    """Tokens of a conversation."""
    source: OwnAgent | Environment | LiveAgent
    engine: dict[str, str]
    """The keys of `[engine]` that locate it."""
    machine: Machine = field(default_factory=Machine)
    lora: bool = True
    """Train adapters, which engines load next to the model's weights, instead of all weights."""
    weights_gib: float = 0.0
    """The size of the model's weights."""


def run_toml(project: Project) -> str:
    """Return the text of the file."""
    live = isinstance(project.source, LiveAgent)
    return f"""\
# Both programs read this file: `trainer run {FILE}` starts the gateway with it, and `gateway serve --config {FILE}` is the
# gateway alone. For two machines, put the second half into a file of its own, and `[gateway] url` here.
# Written for this machine: {project.machine}.

# The trainer: learns from batches, and publishes versions to the engines.
[run]
dir = "runs/{project.name}/trainer"
steps = 100
{_model(project)}
[algorithm]
type = "{"reinforce++" if live else "grpo"}"

[optimizer]
lr = {_LORA_LR if project.lora else _FULL_LR:g}

[batch]
tokens = {max(8192, project.context)}                       # in one pass
{_rollout(project)}
# The gateway: serves agents, and records every token.
[server]
port = 8000

[models.{project.name}]
path = {_toml(project.model)}
family = "{project.family}"
aliases = ["*"]                     # unmodified agents request models by names of their own
max_model_len = {project.context}
{_engine(project)}
[sampling]                          # in training episodes only
temperature = {{ override = 1.0 }}    # nothing is learned from temperature 0
top_p = {{ override = 1.0 }}
seed = "ignore"

[staleness]
eta = 1                             # a batch may be sampled by the previous version, too
batch = {32 if live else 8}                          # groups
{_agents(project.source)}{grader_table(project.source.grader)}
[store]
url = "sqlite:///runs/{project.name}/gateway.db"

[control]
recording = "runs/{project.name}/control.jsonl"
"""


def grader_table(grader: str) -> str:
    """Return the table of a grader; empty if there is none."""
    if not grader:
        return ""
    key = "url" if "://" in grader else "function"
    return f"""
[graders.reward]                    # called when an episode is closed without a reward
{key} = {_toml(grader)}
"""


def _model(project: Project) -> str:
    text = f"""
[model]
path = {_toml(project.model)}
"""
    if project.machine.gpus:
        text += (
            'dtype = "bfloat16"\nactivation_checkpointing = 1        # less memory, one more forward pass\n'
        )
    if project.lora:
        text += f"""
[model.lora]                        # `gateway init --full` trains all weights
rank = {RANK}
alpha = {2 * RANK}

[publish]
transport = "lora"                  # adapters alone: merged into bfloat16, most of what early steps learn is rounded away
"""
    return text


def _agents(source: OwnAgent | Environment | LiveAgent) -> str:
    """Return the rest of [staleness] and the table of a live agent; empty for others."""
    if not isinstance(source, LiveAgent):
        return ""
    return f"""\
min_members = 1                     # a conversation is a group of its own

[agents.live]                       # docs/guide/live.md
key = {_toml(source.key)}
mode = "train"
group_size = 1
live = true
idle_s = 1800                       # seconds of silence after which a conversation is over

[update]
canary = 0                          # 0.1 with [engine] count = 2: a tenth of the conversations tries a version first
"""


def _rollout(project: Project) -> str:
    if (lines := project.source.rollout()) is None:
        return ""
    agent = "\n".join(lines)
    text = f"""
[rollout]                           # the trainer runs the agent
{agent}
group_size = 8                      # episodes of a task, whose rewards are compared
concurrency = {64 if project.machine.gpus else 8}
"""
    evaluation = project.source.evaluation()
    if evaluation is not None:
        held_out = "\n".join(evaluation)
        text += f"""
[eval]                              # tasks that are never trained
{held_out}
every = 10                          # steps
"""
    return text


def _engine(project: Project) -> str:
    lines = ["", "[engine]", *(f"{key} = {_toml(value)}" for key, value in project.engine.items())]
    lines.append(f'log = "runs/{project.name}/engine.log"')
    if project.lora:
        lines.append('transport = "lora"                  # each version is an adapter')
        lines.append(f"max_lora_rank = {RANK}                  # [model.lora] rank, or more")
    if project.engine.get("launch") == "vllm":
        lines += _placement(project.machine, project.weights_gib)
    return "\n".join([*lines, ""])


def _placement(machine: Machine, weights_gib: float) -> list[str]:
    """Return the keys that give the engine its part of the machine."""
    if not machine.gpus:
        return [
            'args = ["--enforce-eager", "--dtype", "float32"]',
            "start_s = 900.0",
            "",
            "[engine.env]",
            'VLLM_CPU_KVCACHE_SPACE = "2"        # GiB',
            'VLLM_CPU_OMP_THREADS_BIND = "nobind"  # the trainer needs cores, too',
        ]
    if machine.gpus == 1:
        args = engine_args(_SHARE, machine.gib, weights_gib)
        return [f"args = {json.dumps(args)}  # of the GPU; the trainer has the rest", "start_s = 900.0"]
    spread = 2 ** ((machine.gpus - 1).bit_length() - 1)
    gpus = ",".join(str(gpu) for gpu in range(1, 1 + spread))
    return [
        f"tensor_parallel = {spread}                 # several engines, several ranks: docs/guide/several-gpus.md",
        "start_s = 900.0",
        f'env = {{ CUDA_VISIBLE_DEVICES = "{gpus}" }}  # the trainer has GPU 0',
    ]


def _toml(value: Any) -> str:
    """Return a value of JSON, or a path, as TOML writes it within one line. Raise ValueError for null, which TOML lacks."""
    if value is None:
        raise ValueError("null cannot be written to a TOML file: leave the argument out")
    if isinstance(value, dict):
        pairs = (
            f"{key if _BARE.fullmatch(key) else _toml(key)} = {_toml(each)}" for key, each in value.items()
        )
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)

"""The one file that `gateway init` writes for a project, which `trainer run` and `gateway serve` both read. Pure."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from gateway.cli.init.machine import Machine

FILE = "run.toml"
FUNCTION = re.compile(r"[\w./-]+:\w+")
RANK = 32
_LORA_LR, _FULL_LR = 1e-5, 1e-6
"""Adapters take about ten times the learning rate of full training."""
_SHARE = 0.4
"""Of the only GPU, for the engine; the trainer needs the rest."""
_SOURCES = ("agent", "exit-code")
"""Rewards that come from the agent; any other is a grader."""


@dataclass(frozen=True, slots=True)
class Project:
    """The model, agent, reward and machine that the file is written for."""

    name: str
    model: Path
    family: str
    context: int
    """Tokens of a conversation."""
    agent: str
    reward: str
    """`agent`, `exit-code`, or a grader: `module:function` or a URL."""
    tasks: Path
    held_out: Path | None
    """Tasks for evaluation."""
    engine: dict[str, str]
    """The keys of `[engine]` that locate it."""
    machine: Machine = field(default_factory=Machine)
    lora: bool = True
    """Train adapters, which engines load next to the model's weights, instead of all weights."""

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


def run_toml(project: Project) -> str:
    """Return the text of the file."""
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
type = "grpo"

[optimizer]
lr = {_LORA_LR if project.lora else _FULL_LR:g}

[batch]
tokens = {max(8192, project.context)}                       # in one pass
{_rollout(project)}
# The gateway: serves agents, and records every token.
[server]
port = 8000

[models.{project.name}]
path = {_quoted(project.model)}
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
batch = 8                           # groups
{grader_table(project)}
[store]
url = "sqlite:///runs/{project.name}/gateway.db"

[control]
recording = "runs/{project.name}/control.jsonl"
"""


def grader_table(project: Project) -> str:
    """Return the table of the project's grader; empty if it has none."""
    if not project.grader:
        return ""
    key = "url" if "://" in project.grader else "function"
    return f"""
[graders.reward]                    # called when an episode is closed without a reward
{key} = {_quoted(project.grader)}
"""


def _model(project: Project) -> str:
    text = f"""
[model]
path = {_quoted(project.model)}
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


def _rollout(project: Project) -> str:
    if project.is_function:
        agent = f"agent = {_quoted(project.agent)}"
    else:
        agent = f"command = {json.dumps(shlex.split(project.agent), ensure_ascii=False)}"
        if project.reward_source != "agent":
            agent += f'\nreward = "{project.reward_source}"'
    text = f"""
[rollout]                           # the trainer runs the agent
{agent}
tasks = {_quoted(project.tasks)}
group_size = 8                      # episodes of a task, whose rewards are compared
concurrency = {64 if project.machine.gpus else 8}
"""
    if project.held_out is not None:
        text += f"""
[eval]                              # tasks that are never trained
tasks = [{_quoted(project.held_out)}]
every = 10                          # steps
"""
    return text


def _engine(project: Project) -> str:
    lines = ["", "[engine]", *(f"{key} = {_quoted(value)}" for key, value in project.engine.items())]
    lines.append(f'log = "runs/{project.name}/engine.log"')
    if project.lora:
        lines.append('transport = "lora"                  # each version is an adapter')
        lines.append(f"max_lora_rank = {RANK}                  # [model.lora] rank, or more")
    if project.engine.get("launch") == "vllm":
        lines += _placement(project.machine)
    return "\n".join([*lines, ""])


def _placement(machine: Machine) -> list[str]:
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
        args = f'args = ["--gpu-memory-utilization", "{_SHARE}"]  # of the GPU; the trainer has the rest'
        return [args, "start_s = 900.0"]
    spread = 2 ** ((machine.gpus - 1).bit_length() - 1)
    gpus = ",".join(str(gpu) for gpu in range(1, 1 + spread))
    return [
        f"tensor_parallel = {spread}                 # several engines, several ranks: docs/guide/several-gpus.md",
        "start_s = 900.0",
        f'env = {{ CUDA_VISIBLE_DEVICES = "{gpus}" }}  # the trainer has GPU 0',
    ]


def _quoted(text: str | Path) -> str:
    """Return a TOML string."""
    return json.dumps(str(text), ensure_ascii=False)

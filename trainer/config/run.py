"""`[run]`, `[gateway]` and `[rollout]`: the loop, the gateway that feeds it, and the agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, model_validator

from headgate.configuration import Seconds, Section
from trainer.config.base import Agent


class RunSettings(Section):
    """`[run]`: where the run is stored, and how long it lasts."""

    dir: Path
    """Checkpoints, weights, metrics and the logs of child processes."""
    steps: int = Field(ge=1, le=10_000_000)
    """Optimizer steps after which the run ends, counted from the initial checkpoint over all starts."""
    seed: int = Field(1, ge=0, lt=2**63)
    """The seed of all that is random in the trainer: initial adapters, the order of tasks and of examples. Sampling has its own
    randomness, in the engines."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the GPU if there is one."""
    threads: int | None = Field(None, ge=1, le=1024)
    """PyTorch's threads for one operation; PyTorch's default if absent."""
    deterministic: bool = False
    """Refuse PyTorch operations whose result may differ from run to run."""
    max_failed_share: float = Field(0.5, ge=0, le=1)
    """The run, the driver of `[rollout]` and an evaluation each stop when a greater share of their newest episodes failed
    (crashes, tools, graders, deadlines); 1: they never stop for that."""
    batch_timeout_s: Seconds = 3600.0
    """Seconds that a leased batch may take without a new group before the run stops; raise it for slow agents."""


class GatewaySettings(Section):
    """`[gateway]`: the gateway to train with: a running one (`url`), or one to start (`config`)."""

    url: str | None = Field(None, pattern=r"^https?://")
    """The URL of a running gateway."""
    admin_key: SecretStr | None = None
    """The gateway's admin key. Or `HEADGATE_ADMIN_KEY` in the environment."""
    model: str | None = None
    """Which of the gateway's trained models this run trains; the first if absent."""
    config: Path | None = None
    """A gateway's TOML file; the trainer starts the gateway as a child process and stops it at the end. Without `config` and
    `url`: this file, if it holds the gateway's tables too."""
    timeout_s: Seconds = 300.0
    """Seconds that the gateway may be unavailable in the middle of a run before the run stops."""
    nodes: tuple[str, ...] = ()
    """The nodes, by the gateway's names, on which this trainer computes: claimed before it computes, released while it waits.
    Groups are then collected until the batch is complete or the gateway has recalled the nodes. Needs the gateway's root key.
    Without nodes, nothing is claimed."""
    offload: Literal["auto", "none", "host", "disk"] = "auto"
    """Where weights, gradients and moments are while the nodes are released: in the `host`'s memory (pinned if there is an
    accelerator), on `disk` (unnamed files in `[run] dir`), or where they are (`none`). `auto`: `host` if there is an
    accelerator, else `none`."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.url is None) == (self.config is None):
            raise ValueError("exactly one of `url` and `config` is needed")
        return self

    @property
    def key(self) -> str | None:
        """The admin key as plain text."""
        return self.admin_key.get_secret_value() if self.admin_key else None


class RolloutSettings(Section):
    """`[rollout]`: an agent (a function or a command), or an environment, to run while training; without the table, other
    programs run the episodes."""

    agent: Agent | None = None
    """`module:function` or `file.py:function`, see `headgate.client`."""
    command: tuple[str, ...] = Field((), repr=False)
    """Instead of an agent: a program and its arguments, which run once per episode, such as `["python", "agent.py"]`."""
    reward: Literal["agent", "exit-code", "grader"] = "agent"
    """The reward of `command`: the last line that it prints (`agent`), its exit status where it prints no number (`exit-code`:
    0 is 1.0, 1 is 0.0), or the gateway's `[graders]` (`grader`)."""
    tasks: Path | None = None
    """A file of JSON lines, one task each; if absent, the environment's own tasks."""
    env: str | None = Field(None, pattern=r"^[\w-]+:.+$")
    """Instead of an agent: `verifiers:NAME`, `inspect:TASK`, `gym:ID` or `reasoning-gym:NAME` (docs/topics/environments.md)."""
    env_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    env_python: Path | None = None
    """The Python that has the environment's package; the trainer's own if absent."""
    env_tasks: int | None = Field(None, ge=1)
    """The most of the environment's own tasks to use; tasks for training are never tasks for evaluation."""
    order: Literal["passes", "difficulty"] = "passes"
    """`passes`: each task once, then each again in another order. `difficulty`: tasks whose groups end with equal rewards come
    less often. The position is kept in `passes.json` or `tasks.json` in `[run] dir`, and a start continues from it."""
    group_size: int = Field(8, ge=1, le=1024)
    """Episodes of each task, whose rewards are compared."""
    spare: int = Field(0, ge=0, le=1024)
    """Additional episodes of every group, which race: for the gateway's `[staleness] spare_members`."""
    concurrency: int = Field(64, ge=1, le=65_536)
    """Episodes that run at the same time, in training and in evaluations."""
    timeout_s: float = Field(600.0, ge=0.1)
    """Seconds that one attempt of an agent at an episode may take, in training and in evaluations."""

    @property
    def order_state(self) -> str:
        """The name of the file that keeps the position in the order."""
        return "passes.json" if self.order == "passes" else "tasks.json"

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        if [self.agent is None, self.env is None, not self.command].count(False) != 1:
            raise ValueError("exactly one of `agent`, `command` and `env` is needed")
        if self.env is None and self.tasks is None:
            raise ValueError("`agent` and `command` need `tasks`")
        if self.reward != "agent" and not self.command:
            raise ValueError(
                "`reward` is for `command`: a function returns its reward, or None for the gateway's graders"
            )
        if self.order == "difficulty" and self.group_size < 2:
            raise ValueError("`order = 'difficulty'` needs a `group_size` of 2 or more")
        return self

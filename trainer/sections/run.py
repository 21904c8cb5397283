"""`[run]`, `[gateway]`, `[rollout]` and `[tasks]`: the loop, the gateway that feeds it, the agents, and what they play."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, model_validator

from scheduler.configuration import Seconds, Section
from trainer.sections.base import Agent


class RunSettings(Section):
    """`[run]`: where the run lives and how long it goes on."""

    dir: Path
    """Checkpoints, weights, metrics and the logs of child processes."""
    steps: int = Field(ge=1, le=10_000_000)
    """Optimizer steps after which the run is over, counted from the initial checkpoint, resumed or not."""
    seed: int = Field(1, ge=0, lt=2**63)
    """The seed of whatever is random in the run: the start of adapters, the order of tasks and of examples. Sampling has its own
    randomness, in the engines."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the GPU if there is one."""
    threads: int | None = Field(None, ge=1, le=1024)
    """PyTorch's threads for one operation; its own choice if absent."""
    deterministic: bool = False
    """Refuse PyTorch operations whose result may differ from run to run."""
    max_excluded: float = Field(0.5, ge=0, le=1)
    """The run stops when a greater share of the episodes that ended lately failed (crashes, tools, graders, deadlines), whoever
    runs them; 1: it goes on whatever happens."""
    image_cache_bytes: int = Field(4 * 2**30, ge=0)
    """The images of episodes are kept in `dir`, each once; beyond so many bytes those used longest ago are removed between
    batches."""
    batch_wait_s: Seconds = 3600.0
    """How long a leased buffer may take until no more groups of it are to come."""


class GatewaySettings(Section):
    """`[gateway]`: the gateway to train with: one that runs (`url`), or one to start (`config`)."""

    url: str | None = Field(None, pattern=r"^https?://")
    """The URL of a gateway that runs."""
    admin_key: SecretStr | None = None
    """The gateway's admin key. Or `HEADGATE_ADMIN_KEY` in the environment."""
    model: str | None = None
    """Which of the gateway's trained models this run trains; its first, if none is named."""
    config: Path | None = None
    """A gateway's TOML file; the trainer starts it as a child process and stops it at the end."""
    start_s: Seconds = 120.0
    """How long it may take to be ready, its engine included."""
    answer_s: Seconds = 300.0
    """How long the gateway may be away in the middle of a run."""
    nodes: tuple[str, ...] = ()
    """The nodes, by the gateway's names for them, on which this trainer computes: claimed before it does, released while it
    waits. Groups are then only gathered until the batch is whole, or the gateway has called the nodes back. It needs the
    gateway's root key. Without any, nothing is claimed."""
    offload: Literal["auto", "none", "host", "disk"] = "auto"
    """Where weights, gradients and moments are while the nodes are released: in the `host`'s memory (pinned where there is an
    accelerator), on `disk`, or where they always are (`none`). `auto`: `host` where there is an accelerator, else `none`."""
    offload_dir: Path | None = None
    """The folder of the files of `disk`, on a disk of each rank's own machine; `[run] dir` if absent. They have no names, and
    are gone with their process."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.url is None) == (self.config is None):
            raise ValueError("exactly one of `url` and `config` is needed")
        return self

    @property
    def key(self) -> str | None:
        """The admin key in the clear."""
        return self.admin_key.get_secret_value() if self.admin_key else None


class RolloutSettings(Section):
    """`[rollout]`: an agent, or somebody's environment, to run while training; without the table, others run the episodes."""

    agent: Agent | None = None
    """`module:function` or `file.py:function`, see `gateway.client`."""
    tasks: Path | None = None
    """JSON lines; of an environment, its own tasks if absent."""
    env: str | None = Field(None, pattern=r"^[\w-]+:.+$")
    """In place of an agent: `verifiers:NAME`, `inspect:TASK`, `gym:ID` or `reasoning-gym:NAME` (docs/topics/environments.md)."""
    env_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    env_python: Path | None = None
    """The Python that has the environment's package; the trainer's own if absent."""
    env_tasks: int | None = Field(None, ge=1)
    """At most so many of the environment's own tasks; those for training are never those for evaluation."""
    group_size: int = Field(8, ge=1, le=1024)
    """Episodes of each task, whose rewards are compared."""
    spare: int = Field(0, ge=0, le=1024)
    """Further episodes of every group, which race: for the gateway's `[staleness] spare_members`."""
    concurrency: int = Field(64, ge=1, le=65_536)
    """Episodes that run at the same time."""
    max_failures: float = Field(0.5, ge=0, le=1)
    """The run stops when a greater share of the last episodes failed; 1: it goes on whatever happens."""
    timeout_s: float = Field(600.0, ge=0.1)
    """How long one attempt of an agent at an episode may take; evaluations have the same limit."""

    @model_validator(mode="after")
    def _one_agent(self) -> Self:
        if (self.agent is None) == (self.env is None):
            raise ValueError("exactly one of `agent` and `env` is needed")
        if self.env is None and self.tasks is None:
            raise ValueError("`agent` needs `tasks`")
        return self


class TaskSettings(Section):
    """`[tasks]`: which of its tasks `[rollout]` plays when."""

    order: Literal["passes", "difficulty"] = "passes"
    """`passes`: each once, then each again in another order. `difficulty`: tasks whose groups end with equal rewards, and so
    teach nothing, come less often. Where the order is, and what is known of the tasks, is kept in `passes.json` or `tasks.json`
    in `[run] dir`, and a start goes on from there."""
    floor: float = Field(0.1, gt=0.0, le=1.0)
    """How often a task comes at least, beside one that teaches each time: what is too hard today may not be tomorrow."""

    @property
    def state(self) -> str:
        """The name of the file that keeps where the order is."""
        return "passes.json" if self.order == "passes" else "tasks.json"

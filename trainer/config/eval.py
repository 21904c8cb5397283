"""`[eval]`: evaluation on tasks that are not trained, by `trainer eval` and during training."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from headgate.configuration import Seconds, Section
from trainer.config.base import Agent

SAMPLES = 1024


class EvalSettings(Section):
    """`[eval]`: evaluation on tasks that are not trained, by `trainer eval` and during training."""

    tasks: tuple[Path, ...] = ()
    """Files of JSON lines, one task each; every file has its own row of figures. Without files, `[rollout] env` is evaluated on
    its held-out tasks."""
    env_tasks: int = Field(200, ge=1)
    """The most held-out tasks of an environment to evaluate."""
    every: int | None = Field(None, ge=1, le=10_000_000)
    """Steps from one evaluation during training to the next; the initial and the last version are evaluated too. Without it,
    training evaluates nothing."""
    agent: Agent | None = None
    """`module:function` or `file.py:function`; `[rollout] agent` if absent."""
    samples: int = Field(1, ge=1, le=SAMPLES)
    """Episodes of each task. pass@k and best@k are reported for this number and the powers of two below it."""
    solved: float = 1.0
    """The least reward that solves a task, for pass@k."""
    temperature: float | None = Field(None, ge=0, le=2)
    """The temperature of all calls; 0 is greedy. If absent, each call keeps its own."""
    top_p: float | None = Field(None, gt=0, le=1)
    """The top-p of all calls. If absent, each call keeps its own."""
    pinned: bool = True
    """During training: publish the next version only when the evaluation of this one has ended, so that one version samples all
    of it. With `false` training does not wait, and the results count the episodes by version."""
    timeout_s: Seconds = 3600.0
    """During training: an evaluation that takes longer is canceled and reported."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k and best@k."""
        return tuple(sorted({self.samples, *(2**i for i in range(self.samples.bit_length()))}))

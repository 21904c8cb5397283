"""`[eval]`: evaluation on tasks that are not trained, by `trainer eval` and beside training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from scheduler.configuration import Seconds, Section
from trainer.sections.base import Agent

SAMPLES = 1024


class EvalSettings(Section):
    """`[eval]`: evaluation on tasks that are not trained, by `trainer eval` and beside training."""

    tasks: tuple[Path, ...] = ()
    """Files of JSON lines, one task each; every file has its own row of figures. With `[rollout] env`, what the environment
    holds out if absent."""
    env_tasks: int = Field(200, ge=1)
    """At most so many of the tasks that an environment holds out."""
    every: int | None = Field(None, ge=1, le=10_000_000)
    """Steps from one evaluation during training to the next, the last step's version included; without it, there is none."""
    at_start: bool = True
    """During training: the initial weights are evaluated too."""
    agent: Agent | None = None
    """`module:function` or `file.py:function`; `[rollout] agent` if absent."""
    samples: int = Field(1, ge=1, le=SAMPLES)
    """Episodes of each task."""
    k: tuple[Annotated[int, Field(ge=1, le=SAMPLES)], ...] = ()
    """The k of pass@k and best@k, none above `samples`; if absent, `samples` and the powers of two below it."""
    solved: float = 1.0
    """The reward from which on an episode has solved its task, for pass@k."""
    temperature: float | None = Field(None, ge=0, le=2)
    """The temperature of all calls; 0 is greedy. As the agent asks, if absent."""
    top_p: float | None = Field(None, gt=0, le=1)
    """The top-p of all calls. As the agent asks, if absent."""
    concurrency: int | None = Field(None, ge=1, le=65_536)
    """Episodes at once; `[rollout] concurrency` if absent."""
    pinned: bool = True
    """During training: the next version is published only when the evaluation of this one has ended, so that one version samples
    all of it. Without, training waits for nothing, and the results say which versions sampled the episodes."""
    timeout_s: Seconds = 3600.0
    """During training: an evaluation that takes longer is given up, which is said."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if any(k > self.samples for k in self.k):
            raise ValueError(f"`k` has a number above `samples` ({self.samples})")
        return self

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k and best@k."""
        powers = (2**i for i in range(self.samples.bit_length()))
        return tuple(sorted({*(self.k or powers), *(() if self.k else (self.samples,))}))

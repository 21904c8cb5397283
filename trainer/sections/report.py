"""`[report]`: where a run's figures go beside `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from scheduler.configuration import Seconds, Section

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class WandbSettings(Section):
    """`[report.wandb]`: Weights & Biases; its API key comes from WANDB_API_KEY or ~/.netrc."""

    entity: str | None = None
    """The user or team that owns the project; the key's own if absent."""
    offline: bool = False
    """Write to disk alone; `wandb sync DIR/wandb/offline-run-*` uploads it later."""
    dir: Path | None = None
    """The folder in which W&B writes its folder `wandb`; `[run] dir` if absent."""


class MlflowSettings(Section):
    """`[report.mlflow]`: MLflow."""

    tracking_uri: str | None = Field(None, pattern=r"^[\w+]+:")
    """A server's URL, or a database such as `sqlite:////data/mlflow.db`; `mlflow.db` in `[run] dir` if absent."""


class ReportSettings(Section):
    """`[report]`: where a run's figures go beside `metrics.jsonl`."""

    to: tuple[TrackerName, ...] = ("tensorboard",)
    """The trackers that get the figures; `wandb` and `mlflow` need the extra `headgate[trackers]`."""
    project: str = Field("headgate", min_length=1, max_length=128)
    """W&B's project, and MLflow's experiment."""
    name: str | None = Field(None, min_length=1, max_length=128)
    """The run's name there; that of `[run] dir` if absent."""
    finish_s: Seconds = 30.0
    """How long the end of a run waits for trackers to take what is left; the next start sends the rest."""
    samples_every: int = Field(10, ge=0, le=1_000_000)
    """A sample of the batch's episodes is written as text in every so many steps, from the first on; 0: never."""
    samples_episodes: int = Field(4, ge=1, le=1000)
    """How many: the best and the worst of each of half as many groups."""
    tokens_every: int = Field(0, ge=0, le=1_000_000)
    """Steps from one table of per-token figures (Parquet) to the next, beginning with the first step; 0: none."""
    wandb: WandbSettings = WandbSettings()
    mlflow: MlflowSettings = MlflowSettings()

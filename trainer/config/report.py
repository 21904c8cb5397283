"""`[report]`: where a run's figures go in addition to `metrics.jsonl`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headgate.configuration import Section

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class ReportSettings(Section):
    """`[report]`: where a run's figures go in addition to `metrics.jsonl`."""

    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """The trackers that receive the figures; `wandb` and `mlflow` need the extra `headgate[trackers]`, and are configured by
    their own environment variables (docs/topics/trainer.md)."""
    project: str = Field("headgate", min_length=1, max_length=128)
    """W&B's project, and MLflow's experiment."""
    name: str | None = Field(None, min_length=1, max_length=128)
    """The run's name in trackers and in the console; that of `[run] dir` if absent."""
    samples_every: int = Field(10, ge=0, le=1_000_000)
    """Steps from one sample of a batch's episodes (text) to the next, beginning with the first step; 0: none."""
    tokens_every: int = Field(10, ge=0, le=1_000_000)
    """Steps from one table of per-token figures (Parquet) to the next, beginning with the first step; 0: none."""
    tokens_mib: int = Field(1024, ge=1, le=2**30)
    """MiB that the tables of a run may have: the oldest are deleted, and the newest is always kept."""

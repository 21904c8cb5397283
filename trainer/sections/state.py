"""`[checkpoint]` and `[weights]`: what is written, and how long it is kept."""

from __future__ import annotations

from pydantic import Field

from trainer.sections.base import Seconds, Section


class CheckpointSettings(Section):
    """`[checkpoint]`: how often one is written, and how many are kept."""

    every: int = Field(1, ge=1, le=10_000)
    """Steps from one checkpoint to the next. Above 1 a trainer that was killed trains the recorded batches since the last one
    again, and goes on if that gives the published weights to the bit, which needs `[run] deterministic`."""
    keep: int = Field(2, ge=1, le=10_000)


class WeightsSettings(Section):
    """`[weights]`: published versions."""

    keep: int = Field(3, ge=2, le=10_000)
    """Directories kept; the current version and its parent always are."""
    publish_s: Seconds = 600.0
    """How long the engines may take to run a published version."""

"""`[optimizer]`: how a gradient becomes a step."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.sections.base import Section


class OptimizerSettings(Section):
    """`[optimizer]`: AdamW, with a linear warm-up to a constant learning rate."""

    lr: float = Field(ge=0, le=1)
    """0 trains nothing and publishes the same weights again and again: a control run."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    eps: float = Field(1e-8, gt=0, le=1)
    weight_decay: float = Field(0.0, ge=0, le=1)
    grad_clip: float = Field(1.0, gt=0)
    """The largest norm of the whole gradient; `inf` clips nothing."""
    warmup_steps: int = Field(0, ge=0)
    max_skipped_steps: int = Field(3, ge=1, le=10_000)
    """The run stops after so many steps in a row that were skipped. A step whose loss or gradient is not finite is skipped: its
    batch counts as trained, and its weights are those of the version before."""

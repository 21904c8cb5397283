"""`[optimizer]`: how a gradient becomes a step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scheduler.configuration import Section

Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Section):
    """`[optimizer]`: AdamW, or Muon for the matrices of the layers and AdamW for the rest."""

    type: Literal["adamw", "muon"] = "adamw"
    """`muon` (Jordan et al., 2024) trains the layers' matrices, its updates scaled to the size of AdamW's, so that `lr` and
    `weight_decay` serve both; embeddings, output head, norms and biases stay with AdamW."""
    lr: float = Field(ge=0, le=1)
    """0 trains nothing and publishes the same weights again and again: a control run."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How `lr` changes between the warm-up and the end of the run (`[run] steps`): it stays, or falls to
    `final_lr_share` of it."""
    final_lr_share: float = Field(0.0, ge=0, le=1)
    """The final learning rate of `cosine` and `linear`, as a share of `lr`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises to `lr`, evenly: the first has 1/warmup_steps of it."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """How much AdamW's two moments keep of their value at each step."""
    eps: float = Field(1e-8, gt=0, le=1)
    """The number added to AdamW's denominator."""
    momentum: Share = 0.95
    """The momentum of Muon."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """The decoupled weight decay: each step takes `lr` times this share off the weights."""
    decayed: Literal["all", "matrices"] = "all"
    """The weights that `weight_decay` acts on: `matrices` leaves norms, biases and other vectors alone."""
    offload: Literal["none", "host"] = "none"
    """`host`: moments are in the host's memory, and come to the device for the step of their own weight, one after another."""
    grad_clip: float = Field(1.0, gt=0)
    """The largest norm of the whole gradient; `inf` clips nothing."""
    max_skipped_steps: int = Field(3, ge=1, le=10_000)
    """The run stops after so many steps in a row that were skipped. A step whose loss or gradient is not finite is skipped: its
    batch counts as trained, and its weights are those of the version before."""

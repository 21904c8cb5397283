"""`[optimizer]`: how a gradient becomes a step."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headgate.configuration import Section

Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Section):
    """`[optimizer]`: AdamW, or Muon for the matrices of the layers and AdamW for the rest."""

    type: Literal["adamw", "muon"] = "adamw"
    """`muon` (Jordan et al., 2024) trains the layers' matrices, with updates scaled to the size of AdamW's, so that `lr` and
    `weight_decay` apply to both; embeddings, output head, norms and biases stay with AdamW."""
    lr: float = Field(ge=0, le=1)
    """The learning rate. 0 is a control run: every version has the same weights."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How `lr` changes between the warm-up and the end of the run (`[run] steps`): not at all, or down to `final_lr_share`."""
    final_lr_share: float = Field(0.0, ge=0, le=1)
    """The final learning rate of `cosine` and `linear`, as a share of `lr`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises linearly to `lr`; the first step has 1/warmup_steps of it."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """The decay rates of AdamW's two moments."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Added to AdamW's denominator; with a value far above the gradient's size, steps follow that size."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """The decoupled weight decay: each step subtracts `lr` times this share of the weights."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: AdamW's moments take half the memory; by stochastic rounding, small changes count in the mean."""
    offload: Literal["none", "host"] = "none"
    """`host`: moments stay in the host's memory and are copied to the device for the step of their weight, one weight at a
    time."""
    offload_gradients: bool = False
    """Keep the sums of gradients in the host's memory too; needs `offload = "host"`. Each micro-batch copies all gradients there
    and, from the second on, back to be added to."""
    grad_clip: float = Field(1.0, gt=0)
    """The largest norm of the whole gradient; `inf` clips nothing."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.offload_gradients and self.offload != "host":
            raise ValueError(
                '`offload_gradients` is for moments in the host\'s memory: set `offload = "host"` too'
            )
        if self.moments == "bfloat16" and self.type == "muon":
            raise ValueError(
                '`moments = "bfloat16"` is for `type = "adamw"`: Muon keeps its moments in float32'
            )
        return self

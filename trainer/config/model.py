"""`[model]`: what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from headgate.configuration import Section

Dtype = Literal["float32", "bfloat16"]
Kernel = Literal["auto", "flex", "varlen", "blocks"]


class LoraSettings(Section):
    """`[model.lora]`: train adapters; the model's own weights stay frozen."""

    rank: int = Field(16, ge=1, le=1024)
    """The rank of each adapter's product; a higher rank can learn more and takes more memory."""
    alpha: float = Field(32.0, gt=0, le=65_536)
    """The product is scaled by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """The layers with adapters: all linear ones but the output head, or those of these names, such as `["q_proj", "v_proj"]`. A
    mixture's experts have adapters if their tensors are named: `gate_up_proj` and `down_proj`, or `experts.down_proj` if layers
    have that name too."""

    @field_validator("targets", mode="before")
    @classmethod
    def _are_names(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "all-linear":
            raise ValueError(f'"all-linear" or a list of names is needed, such as ["{value}"]')
        return value


class ModelSettings(Section):
    """`[model]`: what is trained."""

    path: Path
    """A Hugging Face checkpoint: version 0, and the reference of a KL term."""
    dtype: Dtype = "float32"
    """The dtype of a pass; with `bfloat16`, master weights and moments stay in float32."""
    attention: Literal["spans", "rows"] = "spans"
    """`spans`: rows are packed without padding, and a shared prefix is computed once. `rows`: every row is computed separately,
    by the model's own attention; slower, for architectures that the start refuses with `spans`."""
    attention_kernel: Kernel = "auto"
    """What computes `spans`. `auto`: on a GPU `varlen`, and `flex` where rows share a prefix or `varlen` lacks something; else
    `blocks`. `flex`: FlexAttention, on GPUs. `varlen`: FlashAttention, for bfloat16 on GPUs, without soft caps and sinks; no
    prefix is then shared. `blocks`: products of blocks in PyTorch, slow, on any device."""
    max_model_len: int | None = Field(None, ge=16)
    """The longest row that engines accept, in tokens: `max_model_len` of `[models.NAME]` in the gateway's file. Needed for models
    whose positions depend on it (LongRoPE, dynamic NTK); compared with the gateway's at the start."""
    activation_checkpointing: Annotated[int, Field(ge=0)] = 0
    """Layers that recompute their activations in the backward pass: 0 none, 1 all (least memory, one more forward pass), k every
    k-th."""
    activation_offload: bool = False
    """Keep the inputs of those layers in the host's memory until the backward pass; needs `activation_checkpointing`."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the layers (torch.compile): minutes at the first step, then fewer and larger kernels. `auto`: on GPUs, except with
    what `true` refuses: `attention = "rows"`, `router_replay`, `[parallel] tensor` or `expert`, and layers that have a state."""
    lora: LoraSettings | None = None
    """Adapters to be trained instead of all weights; without the table, none."""
    router_replay: bool = False
    """For a mixture of experts: tokens go through the experts that they went through in the engine, and only the experts' weights
    are computed. Needs `router_replay = true` in the gateway's `[models.NAME]`."""
    missing_routes: Literal["own", "mask"] = "own"
    """With `router_replay`, for tokens whose experts were not recorded: `own`: the trained model chooses; `mask`: they are not
    trained."""
    vision: Literal["frozen", "trained"] = "frozen"
    """Whether the vision tower is trained with the rest or stays frozen."""

    @property
    def adapters(self) -> dict[str, Any] | None:
        """The keys of `[model.lora]` that a checkpoint of adapters records; None without adapters."""
        return None if self.lora is None else self.lora.model_dump(mode="json")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.activation_offload and not self.activation_checkpointing:
            raise ValueError(
                "`activation_offload` moves what checkpointed layers keep: set `activation_checkpointing` to 1 too"
            )
        if self.attention_kernel != "auto" and self.attention == "rows":
            raise ValueError('`attention_kernel` is for `attention = "spans"`: rows use the model\'s own')
        if self.lora is not None and self.vision == "trained":
            raise ValueError(
                '`vision = "trained"` trains no adapters: `[model.lora]` leaves the vision tower frozen'
            )
        return self

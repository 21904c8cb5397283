"""`[parallel]`: how the weights and the work are spread over ranks."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from trainer.sections.base import Seconds, Section

RANKS = 4096


class ParallelSettings(Section):
    """`[parallel]`: the mesh of ranks, which torchrun or `scheduler run` starts; the product is their number."""

    shard: int | None = Field(None, ge=1, le=RANKS)
    """Ranks that share one copy of weights, gradients and moments (FSDP2), layer by layer; all that are left, if absent."""
    replicate: int = Field(1, ge=1, le=RANKS)
    """Copies of that: on several nodes, `shard` within a node and `replicate` between them keeps the weights' traffic off the
    slower network (HSDP)."""
    context: int = Field(1, ge=1, le=RANKS)
    """Ranks that share one sequence. Refused above 1: there is no such support yet."""
    tensor: int = Field(1, ge=1, le=RANKS)
    """Ranks that share each matrix product. Refused above 1: there is no such support yet."""
    timeout_s: Seconds = 600.0
    """How long one rank waits for the others within a step before it ends with an error."""

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        for name, instead in (
            ("context", "a longer sequence fits with activation checkpointing, or more ranks in `shard`"),
            ("tensor", "weights that do not fit on a device are spread by `shard`"),
        ):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} = {getattr(self, name)}: this trainer cannot do that; {instead}")
        return self

"""`[parallel]`: how the weights and the work are spread over ranks."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from headgate.configuration import Seconds, Section

RANKS = 4096


class ParallelSettings(Section):
    """`[parallel]`: the mesh of ranks, which torchrun or `scheduler run` starts; the product is their number."""

    shard: int | None = Field(None, ge=1, le=RANKS)
    """Ranks that share one copy of weights, gradients and moments (FSDP2), layer by layer; if absent, all that are left."""
    replicate: int = Field(1, ge=1, le=RANKS)
    """Copies of that: on several nodes, `shard` within a node and `replicate` across nodes keeps the weights' traffic off the
    slower network (HSDP)."""
    context: int = Field(1, ge=1, le=RANKS)
    """The number of ranks that compute each micro-batch together (Ulysses): each has a part of its tokens and, in attention, all
    tokens of some heads. For sequences whose activations fit on no device; the attention heads are a multiple of it."""
    tensor: int = Field(1, ge=1, le=RANKS)
    """Ranks that share each matrix product of the layers, in addition to `shard` and `replicate`: by transformers' plan for the
    architecture, and a divisor of its attention heads. They are neighbors, because they communicate in every layer."""
    expert: int = Field(1, ge=1, le=RANKS)
    """For a mixture of experts: ranks of those that share one copy, neighbors, that each own a part of every layer's experts, to
    which tokens are sent (all-to-all); a divisor of the number of experts and of `shard`."""
    timeout_s: Seconds = 600.0
    """Seconds that one rank waits for the others within a step before it fails."""

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        if self.tensor > 1 and self.context > 1:
            raise ValueError(
                f"tensor = {self.tensor} and context = {self.context} cannot be combined; long sequences need `context`"
            )
        if self.tensor > 1 and self.expert > 1:
            raise ValueError(
                f"tensor = {self.tensor} and expert = {self.expert} cannot be combined; use `shard` and `expert`"
            )
        if self.shard is not None and self.shard % self.expert:
            raise ValueError(f"expert = {self.expert} is not a divisor of shard = {self.shard}")
        return self

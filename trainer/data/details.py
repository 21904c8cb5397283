"""The parts of a batch that are kept for reports: some of its groups, and the figures of its tokens from the step's passes.

Pure: no I/O, no model; the step computes nothing additional for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy.typing as npt
from torch import Tensor

from headgate.types import Group
from trainer.data.packing import MicroBatch
from trainer.data.tree import Credit

Array = npt.NDArray[Any]
Judged = tuple[Group, Sequence[Credit]]
"""A group, and the advantages of each episode's nodes."""


@dataclass(frozen=True, slots=True)
class DetailChoice:
    """The parts of a batch to keep."""

    groups: int = 0
    """Groups, a sample of the batch's."""
    tokens: bool = False
    """True to keep all groups, and the figures of each trained token."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of the trained tokens of one micro-batch; arrays have shape (trained,)."""

    episodes: tuple[str, ...]
    sequences: Array
    """int64: an index into `episodes`."""
    nodes: Array
    """int64: the node of the episode's tree."""
    positions: Array
    """int64: the number of tokens before it on its path."""
    logprobs: Array
    """The log-probabilities under the weights that are trained, in nats."""
    entropy: Array
    """The entropy of the distribution from which the token was drawn, in nats."""
    advantages: Array
    weights: Array
    """The importance weight; 0 where a mask leaves the token out."""
    clipped: Array
    """bool: it has no policy gradient, because it is outside of the trust region."""
    masked: Array
    """bool: a mask by ratio leaves it out."""

    @classmethod
    def of(
        cls, micro: MicroBatch, logprobs: Tensor, entropy: Tensor, by_token: Mapping[str, Tensor]
    ) -> Figures:
        """Return the figures of a pass. `by_token`: the loss's tensors by token."""
        tensors = {
            "sequences": micro.sequences,
            "nodes": micro.nodes,
            "positions": micro.positions[micro.at],
            "logprobs": logprobs,
            "entropy": entropy,
            "advantages": micro.advantages,
            "weights": by_token["importance_weight"],
            "clipped": by_token["clip_fraction"],
            "masked": by_token["mask_fraction"],
        }
        return cls(
            micro.episodes, **{name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        )

    def __post_init__(self) -> None:
        sizes = {len(getattr(self, f.name)) for f in fields(self) if f.name != "episodes"}
        assert len(sizes) == 1, "every array has an entry for each trained token"


@dataclass(slots=True)
class BatchDetails:
    """The kept parts of one batch."""

    choice: DetailChoice
    groups: list[Judged] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    """The figures of all ranks."""

    def add(self, group: Group, credits: Sequence[Credit]) -> None:
        """Keep the group, if the choice includes it."""
        self.groups.append((group, credits))
        if not self.choice.tokens:
            self.groups = self.sample()

    def sample(self) -> list[Judged]:
        """Return the sample of the batch's groups: the same ones in whatever order they arrived."""
        return sorted(self.groups, key=lambda judged: zlib.crc32(judged[0].group_id.encode()))[
            : self.choice.groups
        ]

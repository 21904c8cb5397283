"""The interface of algorithms: advantages from the rewards of a group, and a loss over a micro-batch of tokens.

Pure tensor maths: no model, no I/O, no optimizer. Invariant: `loss` is a *sum* over tokens; the loop divides the gradient by
`normaliser` at the optimizer step, so that accumulating over micro-batches gives exactly the gradient of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict
from torch import Tensor


class AlgorithmSettings(BaseModel):
    """`[algorithm]`: `type` names the algorithm; the other keys are its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: str


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The inputs of a loss; every tensor has shape (rows, length) and dtype float32 (or float64), unless it says
    otherwise."""

    logprobs: Tensor
    """Under the weights being trained, with gradient, nats."""
    entropy: Tensor
    """The entropy of the distribution that the token was drawn from, in nats; with gradient if `needs_entropy` is true."""
    recorded: Tensor
    """Under the weights that sampled the token, nats."""
    advantages: Tensor
    weights: Tensor
    """The weight of each token in the sum."""
    train: Tensor
    """bool: the tokens that count at all."""
    reference: Tensor | None = None
    """Under the initial weights, nats; None when `needs_reference` is false."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, and sums over the trained tokens of a micro-batch for the metrics."""

    total: Tensor
    """Scalar with gradient: the weighted sum over tokens."""
    sums: dict[str, Tensor]
    """Scalars without gradient; divided by the number of trained tokens they are means."""


class Algorithm(Protocol):
    """One way to learn. Register it in `trainer.algorithms`."""

    @property
    def needs_reference(self) -> bool:
        """True if the loss uses `TokenBatch.reference`."""

    @property
    def reward_kl(self) -> float:
        """The weight of the KL divergence to the initial weights that is taken off the rewards; 0 for none."""

    @property
    def needs_entropy(self) -> bool:
        """True if the loss differentiates `TokenBatch.entropy`."""

    @property
    def trains_without_advantage(self) -> bool:
        """True if the loss has a gradient where the advantage is 0; groups without any advantage are left out otherwise."""

    @property
    def sequence_mean(self) -> bool:
        """True if episodes rather than tokens have equal weight."""

    def advantages(self, rewards: Tensor) -> Tensor:
        """Rewards of one group, shape (episodes,), to advantages of the same shape."""

    def loss(self, batch: TokenBatch) -> Loss:
        """The loss of one micro-batch."""

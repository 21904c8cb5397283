"""The interface of algorithms: advantages from the rewards of groups, and a loss over a micro-batch of tokens.

Pure tensor math: no model, no I/O, no optimizer. What an algorithm remembers from step to step is a `State` of numbers, which the
trainer keeps and writes to its checkpoints. Invariant: `loss` is a *sum* over tokens; the loop divides the gradient by
`normalizer` at the optimizer step, so that accumulating over micro-batches gives exactly the gradient of the whole batch. The
divisor depends on the batch alone, and not on which of its groups have a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from headgate.configuration import Section


class AlgorithmSettings(Section):
    """`[algorithm]`: `type` names the algorithm; the other keys are its own."""

    type: str
    """The name of a shipped algorithm, or `package.module:Name` of a class like this one."""

    def create(self) -> Algorithm:
        """Return the algorithm of these settings."""
        raise NotImplementedError(f"{type(self).__name__} has no method `create`")


State = Mapping[str, float]
"""What an algorithm remembers of earlier steps; empty before the first."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards that are compared: those of a group's episodes, or of their k-th calls. Tensors have shape (episodes,)."""

    values: Tensor
    """float64."""
    lengths: Tensor
    """int64: the sampled tokens that each reward is for, trained or not."""
    staleness: Tensor
    """int64: versions between the weights that sampled its oldest token and those at the beginning of the batch; 0 without
    tokens."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """float64, by name: the parts that agent and graders reported with the rewards; NaN where an episode has none of that name.
    Empty for the rewards of calls."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """All trained tokens of an optimizer step, of every micro-batch and rank; tensors have shape (tokens,)."""

    logprobs: Tensor
    """Under the weights before the step, nats, without gradient."""
    recorded: Tensor
    """Under the weights that sampled the token, nats."""
    advantages: Tensor
    staleness: Tensor
    """int64: versions between the weights that sampled the token and those at the beginning of the batch."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The inputs of a loss: the trained tokens of one micro-batch.

    Every tensor has shape (tokens,) and dtype float32 (or float64), unless noted.
    """

    logprobs: Tensor
    """Under the weights being trained, with gradient, nats."""
    entropy: Tensor
    """The entropy of the distribution that the token was drawn from, in nats; with gradient if `needs_entropy` is true."""
    recorded: Tensor
    """Under the weights that sampled the token, nats."""
    advantages: Tensor
    weights: Tensor
    """The weight of each token in the sum."""
    sequences: Tensor
    """int64: the token's episode, from 0 to `episodes` - 1."""
    ids: Tensor
    """int64: the token itself."""
    staleness: Tensor
    """int64: versions between the weights that sampled the token and those at the beginning of the batch."""
    episodes: int
    """Episodes with a token in this micro-batch."""
    reference: Tensor | None = None
    """Under the initial weights, nats; None when `needs_reference` is false."""
    proximal: Tensor | None = None
    """Under the weights at the beginning of the batch, nats, without gradient; None when `needs_proximal` is false."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """What `Algorithm.statistics` returned for the optimizer step."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, and sums over the trained tokens of a micro-batch for the metrics."""

    total: Tensor
    """Scalar with gradient: the weighted sum over tokens."""
    sums: dict[str, Tensor]
    """Scalars without gradient; divided by the number of trained tokens they are means."""
    by_token: Mapping[str, Tensor]
    """Their terms, of shape (tokens,) and without gradient. Among them are `importance_weight`, which is 0 where a mask leaves
    the token out, and as bool `clip_fraction` (it is outside of the trust region) and `mask_fraction` (a mask leaves it out)."""


class Algorithm(Protocol):
    """One way to learn. Its settings create it; `trainer.algorithms` registers them by name."""

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

    @property
    def scope(self) -> Literal["group", "batch"]:
        """The rewards that advantages depend on; with `batch`, nothing is trained before the batch is whole."""

    @property
    def whole_episodes(self) -> bool:
        """True if the loss needs all trained tokens of an episode in one micro-batch."""

    @property
    def minibatches(self) -> int:
        """Optimizer steps of one pass over a batch; above 1, nothing is trained before the batch is whole."""

    @property
    def epochs(self) -> int:
        """Passes over a batch; above 1, nothing is trained before the batch is whole."""

    @property
    def needs_proximal(self) -> bool:
        """True if the loss uses `TokenBatch.proximal`."""

    @property
    def needs_components(self) -> Sequence[str]:
        """The components of the reward without which no episode can be compared."""

    @property
    def needs_statistics(self) -> bool:
        """True if the loss uses `TokenBatch.statistics`; then nothing is trained before the batch is whole."""

    def advantages(self, groups: Sequence[Rewards], state: State) -> list[Tensor]:
        """Return advantages for each group's rewards, float64, shape (episodes,); `state`: before this step."""

    def next_state(self, groups: Sequence[Rewards], state: State) -> State:
        """Return the state after a step, from all rewards of its batch and the state before it."""

    def statistics(self, step: StepTokens) -> Mapping[str, float]:
        """Return figures of a whole optimizer step; they may not depend on the order of its tokens."""

    def normalizer(self, tokens: int, episodes: int) -> float:
        """Return the divisor of the summed loss of an optimizer step.

        `tokens`: those that may be trained, of groups without advantage too. `episodes`: all, masked or without advantage too.
        """

    def loss(self, batch: TokenBatch) -> Loss:
        """Return the loss of one micro-batch."""

"""The form that all algorithms here have: -c A log p by token, where c is an importance weight or, outside of a trust region, 0.

An algorithm defines how advantages come from rewards (`baselines`), what c is (`Importance`), and the divisor of the sum. Masks,
the KL term and the entropy bonus are the same for all. Invariant: c and the masks weigh only the policy term. The KL term has
the token's own ratio, with which the expectation of its gradient over the sampler's tokens is the true one. The entropy bonus has
weight 1, because the entropy of a context does not depend on the token that was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.base import AlgorithmSettings, Loss, Rewards, State, StepTokens, TokenBatch
from trainer.corrections import CORRECTIONS, MASKS, Ratios, outside_trust_region

Bounds = tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=1)]]
"""The least and the greatest ratio; a ratio of 1 is always between them."""
_LIMIT = 20.0
"""Bound of the exponent of k3, so that no estimate is infinite."""


class PolicySettings(AlgorithmSettings):
    """The keys of every algorithm."""

    mask_token: Bounds | None = None
    """Leave out tokens whose ratio to the sampler is outside [least, greatest], such as [0.5, 2.0]."""
    mask_sequence: Bounds | None = None
    """Leave out episodes whose ratio, the product over their trained tokens, is outside [least, greatest]."""
    mask_geometric: Bounds | None = None
    """Leave out episodes whose geometric mean of ratios is outside [least, greatest], such as [0.99, 1.01]."""
    kl_coef: float = Field(0.0, ge=0, le=10)
    """Weight of the KL divergence to the initial weights; 0 loads no reference."""
    kl: Literal["k3", "k1"] = "k3"
    """The form of the KL divergence. `k3` is a term of the loss: its estimate by token, times the token's ratio to the sampler.
    `k1` is taken off the reward, before advantages: the sum of recorded - reference over an episode's trained tokens, times
    `kl_coef`."""
    kl_cap: float = Field(10.0, ge=1)
    """The largest ratio to the sampler with which a token counts in the `k3` term; `inf` truncates nothing. No other correction,
    clip or mask acts on that term."""
    entropy_coef: float = Field(0.0, ge=0, le=10)
    """Weight of an entropy bonus."""


class CorrectionSettings(AlgorithmSettings):
    """The keys of algorithms whose importance weights may be chosen."""

    correction: Literal["none", "tis_token", "tis_sequence", "icepop"] = "tis_token"
    """The importance weight: 1 (`none`), the ratio to the sampler cut to the bounds below (`tis_token`), the episode's ratio cut
    to them (`tis_sequence`), or the ratio inside of them and 0 outside (`icepop`)."""
    importance_cap: float = Field(2.0, gt=0)
    """The largest importance weight; `inf` truncates nothing. Under a clip and above 1 + clip_high, it acts on negative
    advantages alone: a token with a positive one is clipped before."""
    importance_floor: float = Field(0.0, ge=0, le=1)
    """The smallest importance weight; 0 raises none. Under a clip and below 1 - clip_low, it acts on positive advantages alone: a
    token with a negative one is clipped before."""


class ClipSettings(AlgorithmSettings):
    """The keys of algorithms with a trust region."""

    clip_low: float = Field(0.2, ge=0, le=1)
    """A token with a negative advantage gives no gradient once its ratio is below 1 - clip_low; 1 turns it off."""
    clip_high: float = Field(0.2, ge=0)
    """A token with a positive advantage gives no gradient once its ratio is above 1 + clip_high; `inf` turns it off."""


@dataclass(frozen=True, slots=True)
class Importance:
    """How much each trained token counts in the policy term; tensors of shape (trained,) without gradient."""

    weight: Tensor
    """The importance weight."""
    outside: Tensor
    """bool: the token is outside of the trust region, and has no policy gradient."""
    pull: Tensor | None = None
    """Added to the loss, times the distance of the token's log-probability from the sampler's; None: 0."""


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """An algorithm made of its parts. `loss` has the gradient of the paper's objective, and the value of -c A log p."""

    settings: PolicySettings
    baseline: Callable[[Sequence[Rewards], State], list[Tensor]]
    """Rewards to advantages, a tensor of shape (episodes,) for each group."""
    importance: Callable[[TokenBatch], Importance]
    average: Literal["token", "sequence", "constant"] = "token"
    """The mean over tokens that may be trained, the mean over episodes of their tokens' means, or the mean over episodes of their
    tokens' sums over `length`; groups without advantage count in each."""
    length: int = 1
    scope: Literal["group", "batch"] = "group"
    minibatches: int = 1
    epochs: int = 1
    sequence_ratios: bool = False
    """True if `importance` has ratios of episodes."""
    measure: Callable[[StepTokens], dict[str, float]] | None = None
    """The figures of a step that `importance` uses."""
    remember: Callable[[Sequence[Rewards], State], State] | None = None
    """The state after a step whose rewards these are; None: the algorithm has no state."""
    needs_components: Sequence[str] = ()
    computes_proximal: bool = True
    """Whether several optimizer steps on a batch have the log-probabilities at its beginning."""

    @property
    def whole_episodes(self) -> bool:
        """True with ratios of episodes, in the weights or in a mask."""
        return self.sequence_ratios or any(MASKS[name].whole_episodes for name, _ in self._masks())

    @property
    def needs_reference(self) -> bool:
        """True with a KL term in the loss."""
        return self.settings.kl_coef > 0 and self.settings.kl == "k3"

    @property
    def reward_kl(self) -> float:
        """`kl_coef` with `kl = "k1"`."""
        return self.settings.kl_coef if self.settings.kl == "k1" else 0.0

    @property
    def needs_entropy(self) -> bool:
        """True with an entropy bonus."""
        return self.settings.entropy_coef > 0

    @property
    def trains_without_advantage(self) -> bool:
        """True with a KL term in the loss, or an entropy bonus."""
        return self.needs_reference or self.needs_entropy

    @property
    def sequence_mean(self) -> bool:
        """True if episodes rather than tokens have equal weight."""
        return self.average == "sequence"

    @property
    def needs_proximal(self) -> bool:
        """True with several optimizer steps on a batch, unless `computes_proximal` is false."""
        return self.computes_proximal and self.minibatches * self.epochs > 1

    @property
    def needs_statistics(self) -> bool:
        """True with `measure`."""
        return self.measure is not None

    def statistics(self, step: StepTokens) -> dict[str, float]:
        """Return what `measure` returns."""
        return {} if self.measure is None else self.measure(step)

    def normalizer(self, tokens: int, episodes: int) -> float:
        """Return the tokens, or the episodes times `length`; at least 1."""
        return float(max(1, tokens if self.average == "token" else episodes * self.length))

    def advantages(self, groups: Sequence[Rewards], state: State) -> list[Tensor]:
        """Return the baseline's advantages."""
        return self.baseline(groups, state)

    def next_state(self, groups: Sequence[Rewards], state: State) -> State:
        """Return what `remember` returns."""
        return {} if self.remember is None else self.remember(groups, state)

    def loss(self, batch: TokenBatch) -> Loss:
        """Return policy gradient, KL term and entropy bonus."""
        importance, kept = self.importance(batch), self._kept(batch)
        weight = torch.where(kept, importance.weight, 0.0)
        policy = -torch.where(importance.outside, 0.0, weight) * batch.advantages * batch.logprobs
        per_token = policy
        if importance.pull is not None:
            per_token = per_token + importance.pull * (batch.logprobs - batch.recorded).abs()
        if self.needs_entropy:
            per_token = per_token - self.settings.entropy_coef * batch.entropy
        reference_kl = torch.zeros_like(batch.recorded)
        if batch.reference is not None:
            reference_kl = _k3(batch.logprobs.detach(), batch.reference)
            per_token = per_token + self.settings.kl_coef * _weighted_k3(
                batch.logprobs, batch.reference, self._kl_weight(batch)
            )
        values = {
            "policy_loss": policy,
            "entropy": batch.entropy,
            "clip_fraction": importance.outside,
            "mask_fraction": ~kept,
            "importance_weight": weight,
            "kl_recorded_k1": batch.recorded - batch.logprobs,
            "kl_recorded_k3": _k3(batch.recorded, batch.logprobs.detach()),
            "kl_reference_k3": reference_kl,
        }
        by_token = {name: value.detach() for name, value in values.items()}
        sums = {name: value.to(torch.float64).sum() for name, value in by_token.items()}
        return Loss((per_token * batch.weights).sum(), sums, by_token)

    def _kl_weight(self, batch: TokenBatch) -> Tensor:
        """Return the ratio of the trained policy to the sampler, cut to `kl_cap`, shape (trained,)."""
        gaps = batch.logprobs.detach() - batch.recorded
        ratios = Ratios(gaps, batch.sequences, batch.episodes).by_token()
        return ratios.clamp(max=self.settings.kl_cap)

    def _masks(self) -> list[tuple[str, Bounds]]:
        """Return the masks that are on, with their bounds."""
        return [(name, bounds) for name in MASKS if (bounds := getattr(self.settings, name)) is not None]

    def _kept(self, batch: TokenBatch) -> Tensor:
        """Return the tokens that no mask leaves out; bool, shape (trained,)."""
        kept, ratios = torch.ones_like(batch.recorded, dtype=torch.bool), sampler_ratios(batch)
        for name, (low, high) in self._masks():
            kept = kept & MASKS[name].apply(ratios, low, high)
        return kept


def sampler_ratios(batch: TokenBatch) -> Ratios:
    """Return the policy at the beginning of the batch (the trained one, where a batch is one step) over the one that sampled."""
    anchor = batch.logprobs.detach() if batch.proximal is None else batch.proximal
    return Ratios(anchor - batch.recorded, batch.sequences, batch.episodes)


def corrected(ratios: Ratios, settings: CorrectionSettings) -> Tensor:
    """Return the importance weights of `[algorithm] correction`, shape (trained,)."""
    correction = CORRECTIONS[settings.correction]
    return correction.apply(ratios, settings.importance_floor, settings.importance_cap)


def corrects_sequences(settings: CorrectionSettings) -> bool:
    """Return whether `[algorithm] correction` needs whole episodes."""
    return CORRECTIONS[settings.correction].whole_episodes


class ClippedSettings(PolicySettings, CorrectionSettings, ClipSettings):
    """The keys of algorithms with a choice of importance weights and a clip by token."""


def clipped(settings: ClippedSettings) -> Callable[[TokenBatch], Importance]:
    """Return the chosen importance weight, with a clip of each token's ratio to the policy that sampled it."""

    def importance(batch: TokenBatch) -> Importance:
        ratios = sampler_ratios(batch)
        outside = outside_trust_region(
            ratios.by_token(), batch.advantages, settings.clip_low, settings.clip_high
        )
        return Importance(corrected(ratios, settings), outside)

    return importance


def _k3(sampler: Tensor, other: Tensor) -> Tensor:
    """Return the k3 estimate of KL(sampler || other), any shape, nats: never negative, unbiased for tokens of `sampler`.

    Source: Schulman, "Approximating KL Divergence" (2020).
    """
    gap = (other - sampler).clamp(-_LIMIT, _LIMIT)
    return gap.exp() - gap - 1.0


def _weighted_k3(logprobs: Tensor, reference: Tensor, weight: Tensor) -> Tensor:
    """Return k3 of KL(logprobs || reference) times `weight`, with the gradient weight * (logprobs - reference).

    Any shape, nats. With the token's ratio to the sampler as `weight`, the expectation of this gradient over the sampler's tokens
    is that of the divergence (TRL: `use_bias_correction_kl`). Written out, for autograd would add exp(reference - logprobs) to
    its own negative, which cancels badly where the two differ much.
    """
    value = logprobs.detach()
    return weight * (_k3(value, reference) + (value - reference) * (logprobs - value))

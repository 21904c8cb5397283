"""A batch while its groups arrive: what was packed and counted of it. The gradient is in the trainer's model.

If advantages depend only on a group and the batch is one optimizer step, micro-batches are computed as they fill (StreamRL).
Otherwise the groups wait for the end of the batch, and are divided into the algorithm's minibatches.
Invariant: the result depends only on the sequence of groups, and not on the portions in which they arrive.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headgate.types import Episode, Group
from trainer.algorithms import Algorithm, Loss, Rewards, State
from trainer.config.batch import CreditSettings
from trainer.config.distill import DistillSettings
from trainer.data import credit, images, tree
from trainer.data.details import BatchDetails, DetailChoice, Figures
from trainer.data.images import ImageSupport
from trainer.data.packing import MicroBatch, Packer
from trainer.data.routes import RouteSupport
from trainer.data.tree import Credit, Row
from trainer.errors import FeedBroken

CANDIDATES = 32
"""Ends of rows among which a version's probe is chosen."""
CANDIDATE_TOKENS = 64
"""The length of such an end."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The micro-batches of one optimizer step, or, if the batch streams, the last of them."""

    micros: list[MicroBatch]
    normalizer: float
    """The divisor of the summed gradient, which includes micro-batches that were computed before."""


@dataclass(slots=True)
class Counts:
    """The counts of the micro-batches that one rank computed."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gap_max: float = 0.0
    computed: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    figures: list[Figures] = field(default_factory=list)


class Batch:
    """The groups of the batch of `version`, as micro-batches for a policy and as sums for the metrics."""

    def __init__(
        self,
        version: int,
        algorithm: Algorithm,
        tokens: int,
        kl: Callable[[Episode, ImageSupport | None], Credit] | None = None,
        *,
        share_prefixes: bool = True,
        credit: CreditSettings | None = None,
        details: DetailChoice | None = None,
        image_support: ImageSupport | None = None,
        route_support: RouteSupport | None = None,
        distill: DistillSettings | None = None,
        state: State | None = None,
    ) -> None:
        """`kl`: the divergence of an episode's nodes from the reference, subtracted from rewards; called if `reward_kl` is not 0.

        `share_prefixes`: whether the attention can compute common prefixes once. `details`: the parts to keep for reports.
        `image_support`: of the model; None if it accepts no images. `route_support`: None if no routes are replayed.
        `distill`: what a teacher's scores count; None: nothing. `state`: what the algorithm remembers of earlier steps.
        """
        self.version = version
        self.group_ids: set[str] = set()
        self.rewards: list[float] = []
        self.kls: list[float] = []
        """The divergence from the reference of each episode, before `kl_coef`; `kl = "k1"` subtracts it from the reward."""
        self.equal_groups = 0
        """The number of groups with equal rewards, which have no advantages."""
        self.trained = 0
        """Trained tokens."""
        self.skipped = 0
        """Tokens that may be trained, of groups that have no gradient; the divisor counts them."""
        self.computed = 0
        """Tokens that went through the model."""
        self.truncated = 0
        """Episodes with a call that stopped at its token limit, or that ended because the context was full."""
        self.masked: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        """Trained tokens by staleness."""
        self.details = BatchDetails(details or DetailChoice())
        self._algorithm = algorithm
        self._kl = kl if algorithm.reward_kl else None
        self._tokens = tokens
        self._share_prefixes = share_prefixes
        self._image_support = image_support
        self._route_support = route_support
        self._unrouted = 0
        self._distill = distill
        self._teacher_gap = 0.0
        self._credit = credit or CreditSettings()
        self._packer = self._new_packer()
        self._waiting: list[tuple[Group, list[Credit]]] = []
        self._state: State = state or {}
        self._compared: list[Rewards] = []
        self._ends: list[tuple[int, ...]] = []
        self._sums: dict[str, float] = defaultdict(float)
        self._gap_max = 0.0
        self._counts = Counts()

    @property
    def streams(self) -> bool:
        """True if micro-batches are computed before the batch is complete."""
        one_pass = self._algorithm.minibatches == 1 and self._algorithm.epochs == 1
        return self._algorithm.scope == "group" and one_pass and not self._algorithm.needs_statistics

    def next_state(self) -> State:
        """Return what the algorithm remembers after a step on this complete batch."""
        return self._algorithm.next_state(self._compared, self._state)

    @property
    def loss(self) -> float:
        """The summed loss up to the last `settle`."""
        return self._sums["loss"]

    def exclude_images(self, names: Set[str]) -> None:
        """Train no token of an episode with one of these images. Call it before the first such group is added."""
        if self._image_support is not None:
            self._image_support = self._image_support.without(names)

    def add_groups(self, groups: Sequence[Group]) -> Iterator[MicroBatch]:
        """Yield the micro-batches that are full with `groups`. Raise FeedBroken for a group that is in the batch already."""
        for group in groups:
            if group.group_id in self.group_ids:
                raise FeedBroken(f"group {group.group_id} arrived twice in batch {self.version}")
            credit.check_components(group, self._algorithm.needs_components)
            self.group_ids.add(group.group_id)
            self.rewards += [episode.reward for episode in group.episodes]
            self.truncated += sum(map(credit.has_truncated_call, group.episodes))
            routed = group if self._route_support is None else self._route_support.masked(group)
            self._waiting.append((routed, self._divergences(routed)))
            if self.streams:
                for credited in self._credited():
                    yield from self._packer.add(self._rows(*credited))

    def minibatches(self) -> list[Minibatch]:
        """Return the rest of the complete batch, by optimizer step."""
        if self.streams:
            return [Minibatch([*self._packer.flush()], self.normalizer)]
        every = self._credited()
        count = max(1, min(self._algorithm.minibatches, len(every)))
        cuts = [len(every) * i // count for i in range(count + 1)]
        return [self._minibatch(every[a:b]) for a, b in itertools.pairwise(cuts)]

    def _credited(self) -> list[tuple[Group, list[Credit]]]:
        """Return and clear the waiting groups, with the advantages of each episode's nodes."""
        groups, divergences = zip(*self._waiting, strict=True) if self._waiting else ((), ())
        self._waiting = []
        found = credit.compare(groups, self._algorithm.reward_kl, self._credit, divergences, self.version)
        self._compared += (rewards := found.rewards)
        return list(zip(groups, found.credits(self._algorithm.advantages(rewards, self._state)), strict=True))

    def _minibatch(self, groups: Sequence[tuple[Group, list[Credit]]]) -> Minibatch:
        before, packer = self._trainable, self._new_packer()
        micros = [micro for group, found in groups for micro in packer.add(self._rows(group, found))]
        micros += packer.flush()
        episodes = sum(len(group.episodes) for group, _ in groups)
        return Minibatch(micros, self._algorithm.normalizer(self._trainable - before, episodes))

    def _new_packer(self) -> Packer:
        return Packer(
            self._tokens, share_prefixes=self._share_prefixes, whole_episodes=self._algorithm.whole_episodes
        )

    def _rows(self, group: Group, credits: Sequence[Credit]) -> list[Row]:
        teaches = any(advantage for each in credits for advantage in each.values())
        self.equal_groups += int(not teaches)
        group = images.masked(credit.masked(group, self._credit), self._image_support)
        self.details.add(group, credits)
        found = tree.rows_of(
            zip(group.episodes, credits, strict=True),
            sequence_mean=self._algorithm.sequence_mean,
            image_support=self._image_support,
            route_support=self._route_support,
            distill=self._distill,
        )
        self.masked += found.masked
        self._ends += map(_end, found.rows)
        self._teacher_gap += found.teacher_gap
        if not teaches and self._distill is None and not self._algorithm.trains_without_advantage:
            self.skipped += found.trained
            return []
        self.trained += found.trained
        self._unrouted += found.unrouted
        return found.rows

    def _divergences(self, group: Group) -> list[Credit]:
        """Return the divergence of nodes from the reference, for each episode; empty unless it is subtracted from the rewards."""
        if self._kl is None:
            return [{} for _ in group.episodes]
        divergences = [self._kl(episode, self._image_support) for episode in group.episodes]
        self.kls += [sum(divergence.values()) for divergence in divergences]
        return divergences

    def count(self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor, loss: Loss) -> None:
        """Count a micro-batch for `settle`: its log-probabilities and entropy, without gradient, and the algorithm's sums."""
        counts = self._counts
        counts.sums["loss"] += float(loss.total.detach())
        for name, value in loss.sums.items():
            counts.sums[name] += float(value)
        if self.details.choice.tokens:
            counts.figures.append(Figures.of(micro, logprobs, entropy, loss.by_token))
        counts.computed += len(micro)
        gaps = (logprobs - micro.recorded).abs()[micro.versions == self.version]
        counts.sums["same_version_tokens"] += gaps.numel()
        counts.sums["gap"] += float(gaps.sum())
        counts.gap_max = max(counts.gap_max, float(gaps.max()) if gaps.numel() else 0.0)
        staleness, tokens = torch.unique(self.version - micro.versions, return_counts=True)
        counts.staleness.update(dict(zip(staleness.tolist(), tokens.tolist(), strict=True)))

    def settle(self, of_all: Callable[[Counts], Iterable[Counts]]) -> None:
        """Add the counts since the last call to the sums; `of_all` returns every rank's counts for this rank's."""
        for counts in of_all(self._counts):
            for name, value in counts.sums.items():
                self._sums[name] += value
            self._gap_max = max(self._gap_max, counts.gap_max)
            self.computed += counts.computed
            self.staleness.update(counts.staleness)
            self.details.figures += counts.figures
        self._counts = Counts()

    @property
    def _trainable(self) -> int:
        """The tokens that may be trained, in groups with a gradient and without."""
        return self.trained + self.skipped

    @property
    def normalizer(self) -> float:
        """The divisor of the summed gradient: whether groups without advantage are computed does not change it."""
        return self._algorithm.normalizer(self._trainable, len(self.rewards))

    @property
    def reward_mean(self) -> float:
        """Over all episodes; 0 without any."""
        return float(np.mean(self.rewards or [0.0]))

    def candidates(self) -> list[tuple[int, ...]]:
        """Return up to `CANDIDATES` ends of rows, all different and spread over the batch, for the next version's probe."""
        chosen = dict.fromkeys(self._ends[:: max(1, len(self._ends) // CANDIDATES)])
        return [sequence for sequence in chosen if len(sequence) > 1][:CANDIDATES]

    def measured(self) -> dict[str, float]:
        """Return the metrics of the whole batch."""
        sums, trained = dict(self._sums), max(1, self.trained)
        same, gap = sums.pop("same_version_tokens", 0.0), sums.pop("gap", 0.0)
        # Without a token of this version the gap is undefined, and 0 would look perfect.
        result = {"logprob_gap_mean": gap / same, "logprob_gap_max": self._gap_max} if same else {}
        if self.kls:
            result["kl_reference_k1"] = float(np.mean(self.kls))
        if self._route_support is not None:
            result["unrouted_tokens"] = float(self._unrouted)
        if self._distill is not None:
            result["kl_teacher_k1"] = -self._teacher_gap / trained
        result["loss"] = sums.pop("loss", 0.0) / self.normalizer
        return result | {name: value / trained for name, value in sums.items()} | {
            "same_version_tokens": same,
            "reward_mean": self.reward_mean,
            "reward_std": float(np.std(self.rewards or [0.0])),
            "equal_reward_groups": self.equal_groups / max(1, len(self.group_ids)),
            "groups": float(len(self.group_ids)),
            "episodes": float(len(self.rewards)),
            "truncated_episodes": self.truncated / max(1, len(self.rewards)),
            "trained_tokens": float(self.trained),
            "skipped_tokens": float(self.skipped),
            "computed_tokens": float(self.computed),
            "staleness_mean": sum(s * n for s, n in self.staleness.items()) / trained,
            "staleness_max": float(max(self.staleness, default=0)),
            **{f"staleness_tokens/{s}": float(n) for s, n in sorted(self.staleness.items())},
            **{f"masked_tokens/{reason}": float(n) for reason, n in self.masked.items()},
        }  # fmt: skip


def _end(row: Row) -> tuple[int, ...]:
    """Return the end of a row, without images: a version's probe is text."""
    image_end = max((image.offset + image.length for image in row.images), default=0)
    return tuple(row.ids[max(image_end, len(row) - CANDIDATE_TOKENS) :].tolist())

"""One buffer as far as it has come: what was packed and counted of it. The gradient itself is in the learner's model.

Invariant: all that is here depends on the sequence of groups alone, and not on the portions in which they came.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gateway.types import Episode, Group
from trainer.algorithms import Algorithm
from trainer.data import packing
from trainer.data.packing import MicroBatch, Packer, Row
from trainer.errors import FeedBroken
from trainer.model import probe


class Batch:
    """The groups of the buffer `version`, as rows for a model and as sums for the metrics."""

    def __init__(
        self,
        version: int,
        algorithm: Algorithm,
        tokens: int,
        kl: Callable[[Episode], float] | None = None,
    ) -> None:
        """`kl`: an episode's divergence from the reference, which is taken off its reward; called if `reward_kl` is not 0."""
        self.version = version
        self.group_ids: set[str] = set()
        self.rewards: list[float] = []
        self.kls: list[float] = []
        """The divergence from the reference of each episode, which `kl = "k1"` takes off its reward; not yet times `kl_coef`."""
        self.equal_groups = 0
        """Groups whose rewards are all equal, and which therefore teach nothing."""
        self.trained = 0
        """Tokens."""
        self.skipped = 0
        """Tokens that could be trained, of groups that have no gradient."""
        self.sequences = 0
        """Episodes with at least one trained token."""
        self.masked: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        """Trained tokens by staleness."""
        self._algorithm = algorithm
        self._kl = kl if algorithm.reward_kl else None
        self._packer = Packer(tokens)
        self._ends: list[tuple[int, ...]] = []
        self._sums: dict[str, float] = defaultdict(float)
        self._gap_max = 0.0

    def take(self, groups: Sequence[Group]) -> Iterator[MicroBatch]:
        """The micro-batches that are full with `groups`. Raises FeedBroken for a group that is in the batch already."""
        for group in groups:
            if group.group_id in self.group_ids:
                raise FeedBroken(f"group {group.group_id} came twice in buffer {self.version}")
            self.group_ids.add(group.group_id)
            yield from self._packer.add(self._rows(group))

    def flush(self) -> Iterator[MicroBatch]:
        """The last micro-batch, if there is one."""
        yield from self._packer.flush()

    def _rows(self, group: Group) -> list[Row]:
        rewards = torch.tensor([e.reward for e in group.episodes], dtype=torch.float64)
        advantages = self._algorithm.advantages(rewards - self._penalties(group))
        self.equal_groups += int(not bool(advantages.any()))
        self.rewards += rewards.tolist()
        episodes = zip(group.episodes, advantages.tolist(), strict=True)
        found = packing.rows_of(episodes, sequence_mean=self._algorithm.sequence_mean)
        self.masked += found.masked
        self._ends += [tuple(row.ids[-probe.TOKENS :].tolist()) for row in found.rows]
        if not advantages.any() and not self._algorithm.trains_without_advantage:
            self.skipped += found.trained
            return []
        self.trained += found.trained
        self.sequences += found.episodes
        return found.rows

    def _penalties(self, group: Group) -> Tensor:
        """The divergence from the reference, weighted; zeros unless it is taken off the rewards."""
        if self._kl is None:
            return torch.zeros(len(group.episodes), dtype=torch.float64)
        kls = [self._kl(episode) for episode in group.episodes]
        self.kls += kls
        return self._algorithm.reward_kl * torch.tensor(kls, dtype=torch.float64)

    def count(self, micro: MicroBatch, logprobs: Tensor, values: Mapping[str, Tensor]) -> None:
        """Adds a micro-batch to the sums: what the model says of its tokens, and the algorithm's sums."""
        for name, value in values.items():
            self._sums[name] += float(value)
        gaps = (logprobs - micro.recorded).abs()[micro.train & (micro.versions == self.version)]
        self._sums["same_version_tokens"] += gaps.numel()
        self._sums["gap"] += float(gaps.sum())
        self._gap_max = max(self._gap_max, float(gaps.max()) if gaps.numel() else 0.0)
        staleness, tokens = torch.unique(self.version - micro.versions[micro.train], return_counts=True)
        self.staleness.update(dict(zip(staleness.tolist(), tokens.tolist(), strict=True)))

    @property
    def normaliser(self) -> float:
        """The divisor of the summed gradient; 1 if nothing is trained."""
        return float(max(1, self.sequences if self._algorithm.sequence_mean else self.trained))

    @property
    def reward_mean(self) -> float:
        """Over all episodes; 0 without any."""
        return float(np.mean(self.rewards or [0.0]))

    def candidates(self) -> list[tuple[int, ...]]:
        """Token sequences among which the next version's probe is chosen."""
        return probe.candidates(self._ends)

    def measured(self) -> dict[str, float]:
        """The metrics of the whole batch."""
        sums, trained = dict(self._sums), max(1, self.trained)
        same, gap = sums.pop("same_version_tokens", 0.0), sums.pop("gap", 0.0)
        # Without a token of this version there is no gap, and 0 would look like a perfect one.
        result = {"logprob_gap_mean": gap / same, "logprob_gap_max": self._gap_max} if same else {}
        if self.kls:
            result["kl_reference_k1"] = float(np.mean(self.kls))
        result["loss"] = sums.pop("loss", 0.0) / self.normaliser
        return result | {name: value / trained for name, value in sums.items()} | {
            "same_version_tokens": same,
            "reward_mean": self.reward_mean,
            "reward_std": float(np.std(self.rewards or [0.0])),
            "equal_reward_groups": self.equal_groups / max(1, len(self.group_ids)),
            "groups": float(len(self.group_ids)),
            "episodes": float(len(self.rewards)),
            "trained_tokens": float(self.trained),
            "skipped_tokens": float(self.skipped),
            "staleness_mean": sum(s * n for s, n in self.staleness.items()) / trained,
            "staleness_max": float(max(self.staleness, default=0)),
            **{f"staleness_tokens/{s}": float(n) for s, n in sorted(self.staleness.items())},
            **{f"masked_tokens/{reason}": float(n) for reason, n in self.masked.items()},
        }  # fmt: skip

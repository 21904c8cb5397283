"""From rewards to advantages: which tokens an episode's reward, and the rewards of its calls, are credited to.

A call is a sampled node of an episode's tree, except for those whose client left (`abandoned`) and those of crashed attempts;
calls are counted in the order in which they ended, over all branches. Invariants:
- by default each node of an episode has its episode's advantage;
- an advantage is an algorithm's, of rewards that are comparable: those of a group's episodes, or of their k-th calls;
- rewards that cancel but for rounding are 0.
Pure: no I/O, no model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headgate.types import ABANDONED, CRASHED_ATTEMPT, Episode, Group, Node
from trainer.algorithms import Rewards
from trainer.config.batch import CreditSettings
from trainer.data import branches
from trainer.data.tree import Credit
from trainer.errors import FeedBroken

OVERLONG = "overlong"
"""The reason for which tokens are masked with `truncated = "mask"`."""
_EXACT = 1e-12
"""A sum below this share of its terms' absolute values is 0 but for rounding."""


@dataclass(frozen=True, slots=True)
class Share:
    """A reward, and the nodes that its advantage belongs to."""

    episode: int
    """The episode's place in its group."""
    nodes: tuple[int, ...]
    reward: float
    tokens: int
    """The sampled tokens that the reward is for."""
    components: Mapping[str, float] = field(default_factory=dict)
    """The parts that were reported with the reward of a whole episode."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rewards of groups that are compared with each other, and whose tokens they are for."""

    groups: Sequence[Group]
    sets: list[list[list[Share]]]
    """For each group, its sets of rewards."""
    version: int
    """The weights at the beginning of the batch."""

    @property
    def rewards(self) -> list[Rewards]:
        """Return the rewards of each set, of all groups."""
        return [
            _rewards(some, group, self.version)
            for group, sets in zip(self.groups, self.sets, strict=True)
            for some in sets
        ]

    def credits(self, advantages: Sequence[Tensor]) -> list[list[Credit]]:
        """Return the advantages of nodes, by index, for each episode of each group; `advantages`: of `rewards`."""
        found = iter(advantages)
        result: list[list[Credit]] = []
        for group, sets in zip(self.groups, self.sets, strict=True):
            credits: list[dict[int, float]] = [{} for _ in group.episodes]
            for some in sets:
                for share, advantage in zip(some, next(found).tolist(), strict=True):
                    credits[share.episode].update(dict.fromkeys(share.nodes, advantage))
            result.append([*credits])
        return result


def compare(
    groups: Sequence[Group],
    reward_kl: float,
    settings: CreditSettings,
    divergences: Sequence[Sequence[Credit]] | None = None,
    version: int = 0,
) -> Comparison:
    """Return the rewards of groups that are compared.

    `divergences`: for each episode of each group, the divergence of its nodes from the reference, which is subtracted from the
    rewards `reward_kl` times. If the algorithm's scope is the batch, all groups of a batch are needed.
    """
    divergences = divergences or [[{} for _ in group.episodes] for group in groups]
    sets = [
        shares(group, divergence, reward_kl, settings)
        for group, divergence in zip(groups, divergences, strict=True)
    ]
    return Comparison(groups, sets, version)


def _rewards(some: Sequence[Share], group: Group, version: int) -> Rewards:
    oldest = [_oldest(group.episodes[share.episode], share.nodes, version) for share in some]
    names = sorted({name for share in some for name in share.components})
    return Rewards(
        torch.tensor([share.reward for share in some], dtype=torch.float64),
        torch.tensor([share.tokens for share in some], dtype=torch.int64),
        version - torch.tensor(oldest, dtype=torch.int64),
        {
            name: torch.tensor([share.components.get(name, math.nan) for share in some], dtype=torch.float64)
            for name in names
        },
    )


def _oldest(episode: Episode, nodes: Sequence[int], version: int) -> int:
    """Return the oldest version that sampled one of these nodes' tokens; `version` if none did."""
    chosen = set(nodes)
    return min(
        (int(n.versions.min()) for n in episode.nodes if n.index in chosen and len(n.versions)),
        default=version,
    )


def check_components(group: Group, names: Sequence[str]) -> None:
    """Raise FeedBroken if an episode of the group was rewarded without one of these components."""
    for episode in group.episodes:
        if missing := [name for name in names if name not in episode.components]:
            reported = ", ".join(sorted(episode.components)) or "nothing"
            raise FeedBroken(
                f"episode {episode.episode_id} was rewarded without the component {missing[0]!r} of [algorithm] components: its"
                f" agent or graders have to report it with the reward (reported: {reported})"
            )


def masked(group: Group, settings: CreditSettings) -> Group:
    """Return the group with `mask_reason` OVERLONG on nodes that `truncated = "mask"` leaves out of training."""
    if settings.truncated != "mask":
        return group
    return replace(group, episodes=tuple(_masked(episode, settings) for episode in group.episodes))


def _masked(episode: Episode, settings: CreditSettings) -> Episode:
    cut = truncated_calls(episode)
    if cut and settings.level == "episode":
        cut = {node.index for node in episode.nodes if node.sampled}
    nodes = (
        replace(node, mask_reason=OVERLONG) if node.index in cut and not node.mask_reason else node
        for node in episode.nodes
    )
    return replace(episode, nodes=tuple(nodes)) if cut else episode


def calls(episode: Episode) -> list[Node]:
    """Return the nodes that an episode's calls sampled, in the order in which the calls ended."""
    return [n for n in episode.nodes if n.sampled and n.mask_reason not in (ABANDONED, CRASHED_ATTEMPT)]


def truncated_calls(episode: Episode) -> set[int]:
    """Return the nodes of calls that stopped at their token limit, and of the last one if the context was full after it."""
    own = calls(episode)
    last = own[-1:] if episode.context_full else []
    return {node.index for node in (*(node for node in own if node.finish_reason == "length"), *last)}


def has_truncated_call(episode: Episode) -> bool:
    """Return whether a call stopped at its token limit, or the context was full after the last one."""
    return bool(truncated_calls(episode))


def shares(
    group: Group, divergences: Sequence[Credit], reward_kl: float, settings: CreditSettings
) -> list[list[Share]]:
    """Return the sets of rewards that are compared: one set of the episodes, one of their k-th calls for each k, or those of
    `branches`.

    The reward of a call is its return, r_k + discount r_(k+1) + discount^2 r_(k+2) + ..., or that of `branches`; the last call
    also earns the part of the episode's reward that is not a call's.
    """
    pairs = list(enumerate(zip(group.episodes, divergences, strict=True)))
    if settings.level == "episode":
        return [[
            Share(
                i,
                tuple(node.index for node in episode.nodes),
                _of_episode(episode, settings) - reward_kl * sum(divergence.values()),
                _sampled_tokens(episode),
                episode.components,
            )
            for i, (episode, divergence) in pairs
        ]]  # fmt: skip
    sets: defaultdict[Hashable, list[Share]] = defaultdict(list)
    for i, (episode, divergence) in pairs:
        nodes = calls(episode)
        off = [reward_kl * divergence.get(node.index, 0.0) for node in nodes]
        earned = [r - kl for r, kl in zip(_of_calls(episode, nodes, settings), off, strict=True)]
        if settings.level == "call":
            found = returns(earned, settings.discount)
            keys: Sequence[Hashable] = range(len(nodes))
        else:
            previous = branches.previous_calls(episode, nodes)
            found = branches.returns(earned, previous, settings.discount)
            keys = branches.compared(nodes, previous, i)
        for key, node, reward in zip(keys, nodes, found, strict=True):
            sets[key].append(Share(i, (node.index,), reward, len(node.ids)))
    return [*sets.values()]


def _of_episode(episode: Episode, settings: CreditSettings) -> float:
    return episode.reward - _punishment(_sampled_tokens(episode), has_truncated_call(episode), settings)


def _sampled_tokens(episode: Episode) -> int:
    return sum(len(node.ids) for node in calls(episode))


def _of_calls(episode: Episode, nodes: Sequence[Node], settings: CreditSettings) -> list[float]:
    """Return the reward of each call; the last one includes the episode's own."""
    posted = [node.reward or 0.0 for node in nodes]
    if posted:
        posted[-1] += _sum([episode.reward, *(-value for value in posted)])
    cut = truncated_calls(episode)
    return [r - _punishment(len(n.ids), n.index in cut, settings) for n, r in zip(nodes, posted, strict=True)]


def returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return, for each reward, the discounted sum of it and of those after it."""
    found: list[float] = []
    total = size = 0.0
    for reward in reversed(rewards):
        total, size = reward + discount * total, abs(reward) + discount * size
        found.append(total if abs(total) > _EXACT * size else 0.0)
    return found[::-1]


def _sum(values: Sequence[float]) -> float:
    return returns(values, 1.0)[0]


def _punishment(tokens: int, truncated: bool, settings: CreditSettings) -> float:
    """Return what is subtracted from the reward of `tokens` tokens."""
    hard = settings.penalty if truncated and settings.truncated == "penalize" else 0.0
    return hard + overlong(tokens, settings)


def overlong(tokens: int, settings: CreditSettings) -> float:
    """Return the soft overlong punishment, as a positive number.

    0 up to `overlong_limit - overlong_buffer` tokens, then rising linearly to `penalty` at `overlong_limit`, and constant beyond.

    Source: Yu et al., "DAPO" (arXiv 2503.14476), section 3.4, where it is 1 at most.
    """
    buffer = settings.overlong_buffer
    if not buffer:
        return 0.0
    excess = tokens - (settings.overlong_limit - buffer)
    return settings.penalty * min(1.0, max(0.0, excess / buffer))

"""Token trees for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headgate.types import Episode, Group, Node, TokenFlag


def prompt(index: int, parent: int, at: int, ids: Sequence[int]) -> Node:
    """A prompt node."""
    return Node(
        index,
        parent,
        at,
        False,
        np.array(ids, np.int32),
        np.zeros(0, np.float32),
        np.zeros(0, np.int32),
        np.zeros(0, np.uint8),
    )


def sampled(
    index: int,
    parent: int,
    at: int,
    ids: Sequence[int],
    *,
    logprob: float = -1.0,
    version: int = 0,
    flags: Sequence[int] | None = None,
    temperature: float = 1.0,
    mask_reason: str = "",
) -> Node:
    """A sampled node."""
    n = len(ids)
    return Node(
        index,
        parent,
        at,
        True,
        np.array(ids, np.int32),
        np.full(n, logprob, np.float32),
        np.full(n, version, np.int32),
        np.array(flags if flags is not None else [TokenFlag.NONE] * n, np.uint8),
        temperature,
        mask_reason,
    )


def group(name: str, rewards: Sequence[float], *, version: int = 0, length: int = 6) -> Group:
    """A group of one-turn episodes, each with other tokens."""
    episodes = []
    for i, reward in enumerate(rewards):
        rng = np.random.default_rng(len(name) * 1000 + i)
        nodes = (
            prompt(0, -1, 0, rng.integers(0, 250, 5).tolist()),
            sampled(1, 0, 5, rng.integers(0, 250, length + i % 3).tolist(), version=version),
        )
        episodes.append(Episode(f"{name}-{i}", reward, nodes))
    return Group(name, name, version, tuple(episodes))


def context_of(episode: Episode, node: Node) -> list[int]:
    """The ids before a node's first token."""
    if node.parent < 0:
        return []
    parent = episode.nodes[node.parent]
    return context_of(episode, parent) + parent.ids[: node.at].tolist()

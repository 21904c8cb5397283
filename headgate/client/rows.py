"""Rows of NumPy arrays from the token trees of a feed, for a trainer of any kind.

A row is one path of an episode's tree: a conversation as one call saw it, and what it sampled. Paths share prefixes, so a sampled
token may be in several rows of an episode. Invariant: over all rows of an episode each sampled token is trained at most once, and
where it is not, its row names the reason. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

from headgate import trees
from headgate.types import Episode, Float32Array, Group, Int32Array

BoolArray = npt.NDArray[np.bool_]
Paths = Literal["all", "newest"]

IN_EARLIER_ROW = "in_earlier_row"
"""The reason for which a sampled token is not trained although it may be: a row before has it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One path of one episode; every array has shape (tokens,), and entry j belongs to token j."""

    group_id: str
    task_id: str
    episode_id: str
    reward: float
    """The episode's; it is the same in all rows of an episode."""
    branch: int
    """The number of the path in its episode, from 0 on."""
    ids: Int32Array
    sampled: BoolArray
    """True for tokens of the model; the others are those of prompts and tool results."""
    train: BoolArray
    """True for tokens to train: sampled, and in none of `masked`."""
    masked: Mapping[str, BoolArray]
    """The sampled tokens that may not be trained, by reason (`headgate/mask_reasons.py`)."""
    logprobs: Float32Array
    """With which tokens were sampled, in nats, at `temperature`; 0 where nothing was sampled."""
    versions: Int32Array
    """The version that sampled the token; -1 where nothing was sampled."""
    temperature: Float32Array
    """By which logits are divided before they are compared; 1 where nothing is trained."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def prompt(self) -> int:
        """The number of tokens before the first sampled one."""
        return int(self.sampled.argmax()) if self.sampled.any() else len(self.ids)

    @property
    def prompt_ids(self) -> Int32Array:
        """The tokens before the first sampled one."""
        return self.ids[: self.prompt]

    @property
    def completion_ids(self) -> Int32Array:
        """The tokens from the first sampled one on, those of tool results and later messages among them."""
        return self.ids[self.prompt :]


def rows_of(groups: Iterable[Group], paths: Paths = "all") -> Iterator[Row]:
    """Yield the rows of groups, group by group and episode by episode.

    `paths`: all of each episode, or only that to its newest call, which is one row for each episode that has tokens. Rows may
    have no token to train. An episode without calls has no row, and its reward still counts in its group. Rows have neither
    images nor what truncated distributions kept, so tokens of episodes with images and of such distributions are masked.
    """
    for group in groups:
        for episode in group.episodes:
            found = list(trees.paths(episode.nodes))
            if paths == "newest" and found:
                last = max(range(len(found)), key=lambda i: found[i][-1].node.index)
                yield _row(group, episode, last, [piece._replace(earlier=0) for piece in found[last]])
            elif paths == "all":
                for branch, path in enumerate(found):
                    yield _row(group, episode, branch, path)


def _row(group: Group, episode: Episode, branch: int, path: trees.Path) -> Row:
    sampled = np.concatenate([np.full(piece.length, piece.node.sampled) for piece in path])
    masked: dict[str, BoolArray] = {}
    for start, piece in zip(accumulate((p.length for p in path), initial=0), path, strict=False):
        for reason, tokens in _masks(piece, episode):
            masked.setdefault(reason, np.zeros(len(sampled), np.bool_))[start : start + piece.length] = tokens

    def column(values: str, filler: float, dtype: type) -> npt.NDArray[np.generic]:
        return np.concatenate([
            getattr(piece.node, values)[: piece.length] if piece.node.sampled else np.full(piece.length, filler)
            for piece in path
        ]).astype(dtype)  # fmt: skip

    train = sampled & ~np.logical_or.reduce([np.zeros(len(sampled), np.bool_), *masked.values()])
    temperature = np.concatenate([np.full(piece.length, piece.node.temperature) for piece in path])
    return Row(
        group_id=group.group_id,
        task_id=group.task_id,
        episode_id=episode.episode_id,
        reward=episode.reward,
        branch=branch,
        ids=np.concatenate([piece.node.ids[: piece.length] for piece in path]).astype(np.int32),
        sampled=sampled,
        train=train,
        masked=masked,
        logprobs=column("logprobs", 0.0, np.float32),  # type: ignore[arg-type]
        versions=column("versions", -1, np.int32),  # type: ignore[arg-type]
        temperature=np.where(train, temperature, 1.0).astype(np.float32),
    )


def _masks(piece: trees.Piece, episode: Episode) -> Iterator[tuple[str, BoolArray]]:
    """Yield the sampled tokens of a piece that are not trained, by reason; none is in two of them."""
    if not piece.node.sampled:
        return
    earlier = np.arange(piece.length) < piece.earlier
    if earlier.any():
        yield IN_EARLIER_ROW, earlier
    if any(node.images for node in episode.nodes):
        yield "images_unseen", ~earlier
        return
    for reason, tokens in trees.untrained(piece.node.without_kept()):
        yield reason, tokens[: piece.length] & ~earlier

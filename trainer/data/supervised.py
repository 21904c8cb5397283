"""The data of supervised fine-tuning: conversations and recorded episodes as groups of one episode, split and ordered.

Invariant: split and order depend on the files, the settings and the seed, so that a run continues where it ended.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from headgate.arrow import groups_from_arrow
from headgate.types import (
    Episode,
    Group,
    Node,
)
from trainer.config.sft import SftSettings
from trainer.data.chat import ChatTemplate, conversations
from trainer.data.tree import rows_of
from trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Examples:
    """The data of a run."""

    learned: tuple[Group, ...]
    held_out: tuple[Group, ...]
    left_out: int
    """Conversations and episodes that are too long."""
    size: int
    """Examples of one step."""
    epochs: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every example was learned once more."""
        return math.ceil(len(self.learned) / self.size)

    @property
    def steps(self) -> int:
        """Steps of all epochs."""
        return self.steps_per_epoch * self.epochs

    def of_step(self, step: int) -> Sequence[Group]:
        """Return the examples of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = random.Random(f"{self.seed}-{epoch}").sample(self.learned, len(self.learned))
        return order[place * self.size : (place + 1) * self.size]


def read(settings: SftSettings, model: Path, seed: int) -> Examples:
    """Read and splits the data. Raise ConfigError if there is none, or if it cannot be learned."""
    found: list[Group] = []
    left_out = 0
    template: ChatTemplate | None = None
    for path in settings.data:
        if not path.is_file():
            raise ConfigError(f"[sft] data: {path} does not exist")
        if path.suffix == ".parquet":
            examples = recorded(path, settings.min_reward)
        else:
            template = template or ChatTemplate.of(model, settings.chat_template_kwargs)
            examples = conversations(path, template)
        for name, nodes in examples:
            if settings.max_tokens is not None and _longest(nodes) > settings.max_tokens:
                left_out += 1
                continue
            number = str(len(found))
            found.append(Group(number, name, 0, (Episode(number, 0.0, nodes),)))
    random.Random(seed).shuffle(found)
    held_out = round(len(found) * settings.held_out_share)
    if len(found) == held_out:
        raise ConfigError(f"[sft] data: there is nothing to learn ({left_out} examples are too long)")
    return Examples(
        tuple(found[held_out:]), tuple(found[:held_out]), left_out, settings.batch_size, settings.epochs, seed
    )


def recorded(path: Path, min_reward: float | None) -> Iterator[tuple[str, tuple[Node, ...]]]:
    """Yield the trees of an export's episodes with at least `min_reward` and something to learn.

    Every sampled token is learned, however it was drawn; tokens that are masked for other reasons (a crashed attempt, an
    abandoned call) are not. Raise ConfigError.
    """
    try:
        groups = groups_from_arrow(pq.read_table(path))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is not an export of episodes: {error}") from error
    for group in groups:
        for episode in group.episodes:
            if min_reward is not None and episode.reward < min_reward:
                continue
            nodes = tuple(map(_as_learned, episode.nodes))
            if rows_of([(Episode("", 0.0, nodes), {})]).rows:
                yield episode.episode_id, nodes


def _as_learned(node: Node) -> Node:
    """Return a node whose tokens are learned at temperature 1, whatever distribution they were drawn from."""
    if not node.sampled:
        return node
    n = len(node.ids)
    return replace(
        node,
        logprobs=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
        flags=np.zeros(n, np.uint8),
        temperature=1.0,
        kept=None,
    )


def _longest(nodes: Sequence[Node]) -> int:
    """Return the length of the longest path."""
    ends: dict[int, int] = {-1: 0}
    starts: dict[int, int] = {-1: 0}
    for node in nodes:
        starts[node.index] = starts[node.parent] + node.at if node.parent >= 0 else 0
        ends[node.index] = starts[node.index] + len(node.ids)
    return max(ends.values())

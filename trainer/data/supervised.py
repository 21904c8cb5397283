"""The data of supervised fine-tuning: conversations and recorded episodes as groups of one episode, split and ordered.

Invariant: split and order depend on the files, the settings and the seed alone, so that a run goes on where it ended.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from gateway.arrow import groups_from_arrow
from gateway.types import Episode, Group, Node
from trainer.data.chat import ChatTemplate, conversations
from trainer.data.tree import rows_of
from trainer.errors import ConfigError
from trainer.sections.sft import SftSettings


@dataclass(frozen=True, slots=True)
class Examples:
    """The data of a run."""

    learnt: tuple[Group, ...]
    held_out: tuple[Group, ...]
    left_out: int
    """Conversations and episodes that are too long."""
    size: int
    """Examples of one step."""
    epochs: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every example was learnt once more."""
        return math.ceil(len(self.learnt) / self.size)

    @property
    def steps(self) -> int:
        """Steps of all epochs."""
        return self.steps_per_epoch * self.epochs

    def of_step(self, step: int) -> Sequence[Group]:
        """The examples of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = random.Random(f"{self.seed}-{epoch}").sample(self.learnt, len(self.learnt))
        return order[place * self.size : (place + 1) * self.size]


def read(settings: SftSettings, model: Path, seed: int) -> Examples:
    """Reads and splits the data. Raises ConfigError if there is none, or if it cannot be learnt."""
    found: list[Group] = []
    left_out = 0
    template: ChatTemplate | None = None
    for path in settings.data:
        if not path.is_file():
            raise ConfigError(f"[sft] data: there is no file {path}")
        if path.suffix == ".parquet":
            examples = recorded(path, settings.min_reward)
        else:
            template = template or ChatTemplate.of(model, settings.template)
            examples = conversations(path, template)
        for name, nodes in examples:
            if settings.max_tokens is not None and _longest(nodes) > settings.max_tokens:
                left_out += 1
                continue
            number = str(len(found))
            found.append(Group(number, name, 0, (Episode(number, 0.0, nodes),)))
    random.Random(seed).shuffle(found)
    apart = round(len(found) * settings.held_out)
    if len(found) == apart:
        raise ConfigError(f"[sft] data: there is nothing to learn ({left_out} examples are too long)")
    return Examples(
        tuple(found[apart:]), tuple(found[:apart]), left_out, settings.examples, settings.epochs, seed
    )


def recorded(path: Path, min_reward: float | None) -> Iterator[tuple[str, tuple[Node, ...]]]:
    """The trees of the episodes of an export that earned enough, and that hold anything to learn.

    Every token that was sampled in them is learnt, however it was drawn; what is masked for another reason (a crashed attempt, an
    abandoned call) is not. Raises ConfigError.
    """
    try:
        groups = groups_from_arrow(pq.read_table(path))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is no export of episodes: {error}") from error
    for group in groups:
        for episode in group.episodes:
            if min_reward is not None and episode.reward < min_reward:
                continue
            nodes = tuple(map(_as_said, episode.nodes))
            if rows_of([(Episode("", 0.0, nodes), {})]).rows:
                yield episode.episode_id, nodes


def _as_said(node: Node) -> Node:
    """A node whose tokens are learnt at temperature 1, whatever distribution they were drawn from."""
    if not node.sampled:
        return node
    n = len(node.ids)
    return replace(
        node,
        logprobs=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
        flags=np.zeros(n, np.uint8),
        temperature=1.0,
    )


def _longest(nodes: Sequence[Node]) -> int:
    """The length of the longest path."""
    ends: dict[int, int] = {-1: 0}
    starts: dict[int, int] = {-1: 0}
    for node in nodes:
        starts[node.index] = starts[node.parent] + node.at if node.parent >= 0 else 0
        ends[node.index] = starts[node.index] + len(node.ids)
    return max(ends.values())

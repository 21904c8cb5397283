"""A sample of a batch's episodes as text: one row for each call, what it was asked, what it answered and what that earned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gateway.types import Episode, Group, Node
from trainer.data import credit
from trainer.data.details import BatchDetails, Judged
from trainer.data.tree import Credit, untrained
from trainer.report.files import whole

LONGEST = 20_000
"""Characters of a prompt or a reply; the middle of a longer one is left out."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Sample:
    """One call."""

    group_id: str
    task_id: str
    episode_id: str
    turn: int
    """The calls of an episode are counted from 1, in the order in which they ended."""
    prompt: str
    """The part of the call's prompt after the last call on its path."""
    reply: str
    reward: float
    """The episode's."""
    call_reward: float | None
    advantage: float
    versions: str
    """Those that sampled it, such as `3` or `2-3`."""
    finish_reason: str
    mask_reason: str
    """The reasons why tokens are not trained, each with their number; empty if all are trained."""
    tokens: int


def samples_of(details: BatchDetails, episodes: int, decode: Decode) -> list[Sample]:
    """The calls of up to so many episodes: the best and the worst of each group."""
    found: list[Sample] = []
    for judged in details.sample():
        for episode, given in _ends(judged)[: max(0, episodes)]:
            found += _calls(judged[0], episode, given, decode)
            episodes -= 1
    return found


def _ends(judged: Judged) -> list[tuple[Episode, Credit]]:
    group, credits = judged
    ranked = sorted(zip(group.episodes, credits, strict=True), key=lambda one: one[0].reward, reverse=True)
    return [ranked[0], ranked[-1]] if len(ranked) > 1 else ranked


def _calls(group: Group, episode: Episode, given: Credit, decode: Decode) -> Iterator[Sample]:
    nodes = {node.index: node for node in episode.nodes}
    for turn, node in enumerate(credit.calls(episode), 1):
        reasons = {reason: int(tokens.sum()) for reason, tokens in untrained(node)}
        versions = np.unique(node.versions).tolist()
        yield Sample(
            group_id=group.group_id,
            task_id=group.task_id,
            episode_id=episode.episode_id,
            turn=turn,
            prompt=_short(decode(_asked(node, nodes))),
            reply=_short(decode(node.ids.tolist())),
            reward=episode.reward,
            call_reward=node.reward,
            advantage=given.get(node.index, 0.0),
            versions="-".join(str(v) for v in dict.fromkeys((*versions[:1], *versions[-1:]))),
            finish_reason=node.finish_reason,
            mask_reason=", ".join(
                f"{reason} ({count} of {len(node.ids)})" for reason, count in reasons.items()
            ),
            tokens=len(node.ids),
        )


def _asked(node: Node, nodes: Mapping[int, Node]) -> list[int]:
    """The tokens between a call and the call before it on its path."""
    ids: list[int] = []
    while node.parent >= 0 and not (parent := nodes[node.parent]).sampled:
        ids = parent.ids[: node.at].tolist() + ids
        node = parent
    return ids


def _short(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def write(path: Path, samples: Sequence[Sample]) -> None:
    """Writes samples as JSON lines, at once."""
    with whole(path) as aside:
        aside.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples))

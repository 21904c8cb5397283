"""A sample of a batch's episodes as text: a row for each call with prompt, reply and reward, as JSON lines and as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from headgate.trees import untrained
from headgate.types import (
    Episode,
    Group,
    Node,
)
from trainer.data import credit
from trainer.data.details import BatchDetails, Judged
from trainer.data.tree import Credit
from trainer.errors import ConfigError
from trainer.report.files import atomic_file

LONGEST = 20_000
"""Characters of a prompt or a reply; the middle of a longer one is left out."""
EXCERPT = 300
"""Characters of the last reply in a row of an episode."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Decode = Callable[[Sequence[int]], str]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One call."""

    group_id: str
    task_id: str
    episode_id: str
    turn: int
    """The number of the call in its episode, from 1, in the order in which calls ended."""
    prompt: str
    """The part of the call's prompt after the last call on its path."""
    reply: str
    reward: float
    """The episode's."""
    call_reward: float | None
    advantage: float
    versions: str
    """The versions that sampled it, such as `3` or `2-3`."""
    finish_reason: str
    mask_reason: str
    """The reasons why tokens are not trained, each with the number of tokens; empty if all are trained."""
    tokens: int


def samples_of(details: BatchDetails, episodes: int, decode: Decode) -> list[Sample]:
    """Return the calls of at most `episodes` episodes: the best and the worst of each group."""
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
            prompt=_short(decode(_prompt_ids(node, nodes))),
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


def _prompt_ids(node: Node, nodes: Mapping[int, Node]) -> list[int]:
    """Return the tokens between a call and the call before it on its path."""
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
    """Write samples as JSON lines, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples))


def episodes_of(calls: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each episode, from the rows of its calls (`Sample`), which must be adjacent."""
    return [_episode(list(of_one)) for _, of_one in groupby(calls, key=lambda call: call["episode_id"])]


def _episode(calls: list[Row]) -> dict[str, Any]:
    last, reasons = calls[-1], [call["mask_reason"] for call in calls if call["mask_reason"]]
    return {
        "task_id": last["task_id"],
        "group_id": last["group_id"],
        "episode_id": last["episode_id"],
        "reward": last["reward"],
        "reason": "; ".join(dict.fromkeys(reasons)) or "trained",
        "versions": _version_range([call["versions"] for call in calls]),
        "calls": len(calls),
        "tokens": sum(call["tokens"] for call in calls),
        "finish_reason": last["finish_reason"],
        "text": _excerpt(last["reply"]),
    }


def _version_range(spans: Sequence[str]) -> str:
    """Return the oldest and the newest version, such as `2-4`."""
    numbers = [int(number) for span in spans for number in span.split("-") if number]
    return "-".join(str(number) for number in dict.fromkeys((min(numbers), max(numbers)))) if numbers else ""


def _excerpt(text: str) -> str:
    return text if len(text) <= EXCERPT else f"{text[: EXCERPT - 4]} ..."


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def newest(directory: Path, step: int | None = None) -> Path:
    """Return the file of a step under `[run] dir`, or of the newest step that has one. Raise ConfigError, which lists them."""
    files = sorted((directory / "samples").glob("step-*.jsonl"))
    chosen = [file for file in files if step is None or int(file.stem.removeprefix("step-")) == step]
    if not chosen:
        steps = ", ".join(file.stem.removeprefix("step-").lstrip("0") for file in files)
        existing = f"steps with samples: {steps}" if files else "[report] samples_every = 10 writes them"
        which = "any step" if step is None else f"step {step}"
        raise ConfigError(f"{directory}: no samples of {which}; {existing}")
    return chosen[-1]


def as_markdown(rows: Sequence[Row]) -> str:
    """Return rows as Markdown without control characters; fences are longer than any in the text."""
    return "\n".join(_row_as_markdown(row) for row in rows)


def as_table(rows: Sequence[Row]) -> str:
    """Return rows of equal columns as a Markdown table; line breaks and control characters become spaces."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return _UNPRINTABLE.sub(" ", text).replace("\n", " ").replace("|", "\\|")


def _row_as_markdown(row: Row) -> str:
    call = "" if row["call_reward"] is None else f", of the call {row['call_reward']:g}"
    facts = [
        f"reward {row['reward']:g}{call}",
        f"advantage {row['advantage']:+.3f}",
        f"{row['tokens']} tokens of version {row['versions']}",
        *([row["finish_reason"]] if row["finish_reason"] else []),
        *([f"not trained: {row['mask_reason']}"] if row["mask_reason"] else []),
    ]
    title = (
        f"## Episode {row['episode_id']}, call {row['turn']} (task {row['task_id']}, group {row['group_id']})"
    )
    parts = [title, "; ".join(facts), "Prompt:", _fenced(row["prompt"]), "Reply:", _fenced(row["reply"])]
    return _UNPRINTABLE.sub("", "\n\n".join(parts)) + "\n"


def _fenced(text: str) -> str:
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"

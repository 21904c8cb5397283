"""What the adapters of other trainers share: the next batch, checked, as the rows of each episode. Owns no state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from headgate.client import Batch, Feed, Row


@dataclass(frozen=True)
class Member:
    """An episode of a group."""

    group_id: str
    number: int
    """In its group, from 0 on."""
    reward: float
    rows: list[Row]
    """The paths with tokens to train. An episode that has none is one row without loss, so that its reward still counts."""


def lease(feed: Feed, live: int, temperature: float, trainer: str) -> tuple[Batch, list[Member]]:
    """Lease the next batch for a `trainer` that holds version `live`; return it with its members, group by group.

    Raise ValueError, and give the batch back, where it would be trained wrongly.
    """
    batch = feed.batch()
    try:
        if batch.parent != live:
            raise ValueError(
                f"{trainer} holds version {live}, and version {batch.parent} is live: another trainer published it; start again"
            )
        check_temperature(batch.rows(), temperature, trainer)
        return batch, list(_members(batch))
    except ValueError as error:
        batch.nack(str(error))
        raise


def check_temperature(rows: Iterable[Row], temperature: float, trainer: str) -> None:
    """Raise ValueError unless all tokens were sampled at the `temperature` by which a `trainer` divides all logits."""
    for row in rows:
        other = row.temperature[row.train & (abs(row.temperature - temperature) > 1e-4)]
        if len(other):
            raise ValueError(
                f"episode {row.episode_id} was sampled at temperature {other[0]:g}, and {trainer}'s is {temperature:g}:"
                " set [sampling] temperature = { override = ... } in the gateway"
            )


def _members(batch: Batch) -> Iterator[Member]:
    rows = defaultdict(list)
    filler: Row | None = None
    for row in batch.rows():
        if filler is None and len(row.prompt_ids) and len(row.completion_ids):
            filler = replace(row, train=row.train & False)
        if row.train.any():
            rows[row.episode_id].append(row)
    if filler is None:
        raise ValueError(f"no episode of batch {batch.number} has a sampled token")
    for group in batch.groups:
        for number, episode in enumerate(group.episodes):
            yield Member(group.group_id, number, episode.reward, rows[episode.episode_id] or [filler])

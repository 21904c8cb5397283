"""Reads groups from the store as a trainer gets them: the same for a lease, for a trained batch, and for an export.

Sets the flags that cannot be known when a token is recorded: ORPHANED (its version is no longer an ancestor of the newest) and
LATE (it is older than the bound allows in its batch, the last guard of the bound). Both are as of the moment of reading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from sqlalchemy import Connection

from gateway.config import StalenessSettings
from gateway.store import episodes, refused_calls, routes, turns
from gateway.store.records import TrainedGroup
from gateway.store.sampled import reasons
from gateway.training_feed.decision_log import Entry
from headgate.errors import NotFound
from headgate.types import Episode, Group, Int32Array, Node, TokenFlag, UInt8Array

Orphans = Callable[[], Collection[int]]


@dataclass(frozen=True, slots=True)
class GroupReader:
    """Reads the groups of one trained model."""

    model: str
    staleness: StalenessSettings
    orphans: Orphans = tuple
    """The versions whose tokens do not count now."""

    def read(self, connection: Connection, entries: Sequence[Entry]) -> tuple[Group, ...]:
        """Return the groups, each with its rewarded episodes in the order in which they were opened.

        Raise NotFound if any of them was deleted: a batch is read whole or not at all.
        """
        wanted = [episode_id for entry in entries for episode_id in entry.rewarded]
        rows = {row["id"]: row for row in episodes.by_id(connection, wanted)}
        if missing := sum(episode_id not in rows for episode_id in wanted):
            raise NotFound(f"{missing} of these {len(wanted)} episodes were deleted", code="episodes_deleted")
        nodes = routes.with_routes(connection, self.model, turns.nodes(connection, self.model, wanted))
        full = refused_calls.ended_full(connection, self.model, wanted)
        marks = self._marks()
        groups = []
        for entry in entries:
            own = sorted((rows[e] for e in entry.rewarded), key=lambda row: (row["created_at"], row["id"]))
            members = tuple(
                Episode(
                    row["id"],
                    cast(float, row["reward"]),
                    tuple(marks.node(n, entry.batch) for n in nodes[row["id"]]),
                    row["id"] in full,
                    row["components"] or {},
                )
                for row in own
            )
            groups.append(Group(entry.group_id, own[0]["task_id"], entry.version, members, entry.batch))
        return tuple(groups)

    def complete(self, connection: Connection, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries whose episodes are all still stored."""
        wanted = [episode_id for entry in entries for episode_id in entry.rewarded]
        kept = episodes.stored(connection, wanted)
        return [entry for entry in entries if kept.issuperset(entry.rewarded)]

    def masks(self, connection: Connection, entries: Sequence[Entry]) -> dict[str, Counter[str]]:
        """Each episode's sampled tokens that are not offered for training, counted by reason; each token has one reason."""
        batches = {episode_id: entry.batch for entry in entries for episode_id in entry.rewarded}
        marks = self._marks()
        masked: dict[str, Counter[str]] = {episode_id: Counter() for episode_id in batches}
        for turn in turns.sampled(connection, self.model, list(batches)):
            if turn.mask_reason:
                masked[turn.episode_id][turn.mask_reason] += len(turn.flags)
            else:
                masked[turn.episode_id] += reasons(
                    marks.flags(turn.versions, turn.flags, batches[turn.episode_id])
                )
        return masked

    def marked(self, nodes: Sequence[Node], batch: int) -> list[Node]:
        """Return nodes with the flags that their tokens have now in a batch; -1: in none."""
        marks = self._marks()
        return [marks.node(node, batch) for node in nodes]

    def _marks(self) -> _Marks:
        return _Marks(self.staleness.eta, np.asarray(sorted(self.orphans()), np.int32))


@dataclass(frozen=True, slots=True)
class _Marks:
    """The flags that are only known now."""

    eta: int
    orphans: Int32Array

    def flags(self, versions: Int32Array, flags: UInt8Array, batch: int) -> UInt8Array:
        """Return the flags of tokens in a batch (-1: in none), with what is only known now; the array itself if that is
        nothing."""
        for wrong, flag in (
            (np.isin(versions, self.orphans), TokenFlag.ORPHANED),
            (versions < batch - self.eta, TokenFlag.LATE),
        ):
            if wrong.any():
                flags = flags | (wrong * np.uint8(flag))
        return flags

    def node(self, node: Node, batch: int) -> Node:
        """Return a node with the flags that its tokens have now."""
        flags = self.flags(node.versions, node.flags, batch)
        return node if flags is node.flags else replace(node, flags=flags)


def as_of(row: TrainedGroup) -> Entry:
    """Return the entry of a decision `trained`."""
    kept = row["details"]
    return Entry(row["group_id"], kept["version"], row["batch"], list(kept["episodes"]))

"""Finds and deletes closed episodes that nothing needs any more.

An episode is *needed*, and stays whatever its age,
- while its group is not over: it may still be trained (its batch fills, waits or is leased);
- while the batch in which it was trained is not in a checkpoint for certain: after a crash its trainer trains it again. An
  acknowledgement names the newest checkpoint, which may be that of the step before the first batch that names it, so batches from
  that one on are kept. Where the newest acknowledgement names none, nothing can be trained again from it;
- while a response of another episode goes on from one of its responses: that conversation would lose its beginning.

Invariants: an episode is deleted whole, in one transaction, with its nodes, calls, exchanges, responses and decisions. One
decision is left of it, `deleted`, so that its fate can be looked up (see `forget`). The events of the ledger stay, and so do
the records of trained batches. What is not needed once (but for the responses) is never needed again, so it does no harm if
several processes delete concurrently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import Connection, delete, exists, func, literal, select, tuple_

from gateway.store import images, tallies
from gateway.store.columns import portions
from gateway.store.decisions import Decision, insert_decisions
from gateway.store.models import CallRow, DecisionRow, EpisodeRow, LeaseRow, ResponseRow

Row = Mapping[str, Any]
Fate = Literal["trained", "untrained", "eval"]
Needed = Literal["group", "checkpoint", "responses", "unknown"]
"""The reason why an episode stays. `unknown`: it is older than the first decisions, so its group's end is unknown."""

PAGE = 100
"""Episodes that one transaction looks at."""
_CALLS = 500
"""About how many calls one transaction deletes, so that others do not wait for long."""
_ENDS = ("trained", "skipped", "dropped")
_ALONE = DecisionRow.kind.in_([literal(kind, literal_execute=True) for kind in ("refused", "deleted")])
"""The condition of the index that serves it, word for word."""
_ROW = [EpisodeRow.__table__.c[n] for n in ("id", "group_id", "closed_at", *tallies.KEY)]


@dataclass(frozen=True, slots=True)
class Ages:
    """Episodes that ended before these moments (seconds since the epoch) are deleted; None: none are."""

    trained: float | None
    untrained: float | None
    """Training episodes that no batch was trained on."""
    eval: float | None

    @property
    def newest(self) -> float | None:
        """Everything that ended later is kept."""
        return max((at for at in (self.trained, self.untrained, self.eval) if at is not None), default=None)

    def expired(self, fate: Fate, closed_at: float) -> bool:
        """Return true if an episode is old enough."""
        at = {"trained": self.trained, "untrained": self.untrained, "eval": self.eval}[fate]
        return at is not None and closed_at < at


@dataclass(frozen=True, slots=True)
class ClosedEpisode:
    """A closed episode."""

    row: Row
    fate: Fate
    batch: int | None
    """The batch that was trained on it."""
    needed: Needed | None
    calls: int


@dataclass(slots=True)
class Swept:
    """The deleted rows, or those that would be."""

    deleted: Counter[Fate] = field(default_factory=Counter)
    calls: int = 0
    needed: Counter[Needed] = field(default_factory=Counter)
    """Old enough, and kept."""

    def add(self, other: Swept) -> None:
        """Sum up."""
        self.deleted += other.deleted
        self.calls += other.calls
        self.needed += other.needed


Place = tuple[float, str]
"""`closed_at` and id of an episode."""


def sweep(
    connection: Connection, ages: Ages, after: Place | None, *, dry: bool
) -> tuple[Swept, Place | None]:
    """Delete some of the episodes that are too old, the oldest first.

    Returns the deleted, and where to continue (None: nothing is left). `dry`: deletes nothing and returns the same.
    """
    if ages.newest is None:
        return Swept(), None
    query = select(*_ROW).where(EpisodeRow.closed_at < ages.newest)
    if after is not None:
        query = query.where(tuple_(EpisodeRow.closed_at, EpisodeRow.id) > tuple_(*after))
    query = query.order_by(EpisodeRow.closed_at, EpisodeRow.id).limit(PAGE)
    rows = [dict(row) for row in connection.execute(query).mappings()]
    swept, chosen, looked_at = choose(look(connection, rows), ages)
    if not dry:
        remove(connection, chosen, "retention")
    if looked_at == len(rows) < PAGE:
        return swept, None
    last = rows[looked_at - 1]
    return swept, (last["closed_at"], last["id"])


def choose(episodes: Sequence[ClosedEpisode], ages: Ages) -> tuple[Swept, list[ClosedEpisode], int]:
    """Choose what to delete of some episodes; return also the sum of it, and the number of episodes that were looked
    at."""
    swept = Swept()
    chosen: list[ClosedEpisode] = []
    for looked_at, found in enumerate(episodes):
        if not ages.expired(found.fate, found.row["closed_at"]):
            continue
        if found.needed is not None:
            swept.needed[found.needed] += 1
            continue
        if chosen and swept.calls + found.calls > _CALLS:
            return swept, chosen, looked_at
        chosen.append(found)
        swept.deleted[found.fate] += 1
        swept.calls += found.calls
    return swept, chosen, len(episodes)


def forget(connection: Connection, before: float, limit: int = 1000) -> int:
    """Delete the decisions from before a moment about episodes of which nothing else is stored. Return their number."""
    query = (
        select(DecisionRow.seq).where(_ALONE, DecisionRow.at < before).order_by(DecisionRow.at).limit(limit)
    )
    old = connection.scalars(query).all()
    connection.execute(delete(DecisionRow).where(DecisionRow.seq.in_(old)))
    return len(old)


def look(connection: Connection, rows: Sequence[Row]) -> list[ClosedEpisode]:
    """Return the fate of some closed episodes, and whether they are still needed; in the same order."""
    ids = [row["id"] for row in rows]
    ends, admitted = _ends(connection, {row["group_id"] for row in rows}), _admitted(connection, ids)
    calls, continued = _calls(connection, ids), _continued(connection, ids)
    uncertain = {model: _uncertain(connection, model) for model in {row["model"] for row in rows}}
    found = []
    for row in rows:
        fate, batch, needed = _fate(row, admitted.get(row["id"]), ends)
        if fate == "trained" and batch is not None and batch >= uncertain[row["model"]]:
            needed = "checkpoint"
        if needed is None and row["id"] in continued:
            needed = "responses"
        found.append(ClosedEpisode(row, fate, batch, needed, calls.get(row["id"], 0)))
    return found


def closed(connection: Connection, episode_id: str) -> ClosedEpisode | None:
    """Return a closed episode; None if there is none of this id."""
    return next(iter(closed_among(connection, [episode_id])), None)


def closed_among(connection: Connection, episode_ids: Collection[str]) -> list[ClosedEpisode]:
    """Return those of some episodes that are closed, in any order."""
    query = select(*_ROW).where(EpisodeRow.id.in_(episode_ids), EpisodeRow.state == "closed")
    return look(connection, [dict(row) for row in connection.execute(query).mappings()])


def remove(connection: Connection, found: Sequence[ClosedEpisode], reason: str) -> None:
    """Delete episodes with all that belongs to them."""
    if not found:
        return
    ids, groups = [one.row["id"] for one in found], {one.row["group_id"] for one in found}
    used = images.used_by(connection, ids)
    deleted_rows = connection.execute(
        delete(EpisodeRow).where(EpisodeRow.id.in_(ids)).returning(EpisodeRow.id)
    )
    deleted = set(deleted_rows.scalars())  # another process may have deleted them first
    images.delete_unused(connection, used)
    rows = [one for one in found if one.row["id"] in deleted]
    tallies.changed(connection, [one.row for one in rows], [])
    connection.execute(delete(DecisionRow).where(DecisionRow.episode_id.in_(deleted)))
    left = exists().where(EpisodeRow.group_id == DecisionRow.group_id)
    of_groups = (
        DecisionRow.group_id.in_(groups),
        DecisionRow.episode_id == "",
        DecisionRow.kind != "trained",
    )
    connection.execute(delete(DecisionRow).where(*of_groups, ~left))
    for model in sorted({one.row["model"] for one in rows}):
        insert_decisions(
            connection, model, [_deletion_record(one, reason) for one in rows if one.row["model"] == model]
        )


def _deletion_record(found: ClosedEpisode, reason: str) -> Decision:
    """Return the decision that remains of an episode."""
    row = found.row
    details = {"was": found.fate, "reason": row["reason"], "closed_at": row["closed_at"]}
    return Decision("deleted", row["group_id"], row["id"], reason, found.batch, details=details)


def _fate(
    row: Row, admitted: int | None, ends: Mapping[tuple[str, str], Sequence[Row]]
) -> tuple[Fate, int | None, Needed | None]:
    """Return the fate of an episode, the batch that was trained on it, and whether its group still needs it."""
    if row["mode"] == "eval":
        return "eval", None, None
    if admitted is None:
        return "untrained", None, "unknown"
    own = ends.get((row["model"], row["group_id"]), ())
    end = next((end for end in own if end["seq"] > admitted), None)  # a later group can use the name again
    if end is None:
        return "untrained", None, "group"
    if end["kind"] == "trained" and row["id"] in end["details"]["episodes"]:
        return "trained", end["batch"], None
    return "untrained", None, None


def _ends(connection: Connection, group_ids: Collection[str]) -> dict[tuple[str, str], list[Row]]:
    """Return the ends of the groups of some names, by model and name, the oldest first."""
    columns = [DecisionRow.__table__.c[n] for n in ("seq", "model", "group_id", "kind", "batch", "details")]
    query = select(*columns).where(DecisionRow.group_id.in_(group_ids), DecisionRow.episode_id == "")
    found: dict[tuple[str, str], list[Row]] = {}
    rows = connection.execute(query).mappings()
    for row in sorted(rows, key=lambda row: row["seq"]):  # sorted as in `decisions.of_episode`
        if row["kind"] in _ENDS:
            found.setdefault((row["model"], row["group_id"]), []).append(dict(row))
    return found


def _admitted(connection: Connection, ids: Collection[str]) -> dict[str, int]:
    query = select(DecisionRow.episode_id, DecisionRow.seq).where(
        DecisionRow.episode_id.in_(ids), DecisionRow.kind == "admitted"
    )
    return {row.episode_id: row.seq for row in connection.execute(query)}


def _calls(connection: Connection, ids: Collection[str]) -> dict[str, int]:
    query = select(CallRow.episode_id, func.count().label("calls")).where(CallRow.episode_id.in_(ids))
    return {row.episode_id: row.calls for row in connection.execute(query.group_by(CallRow.episode_id))}


def _continued(connection: Connection, ids: Collection[str]) -> set[str]:
    """Return the episodes with responses that responds of other episodes continue."""
    own = select(ResponseRow.id, ResponseRow.episode_id).where(ResponseRow.episode_id.in_(ids))
    whose = {row.id: row.episode_id for row in connection.execute(own)}
    found: set[str] = set()
    # In the index's own words, or it is not used
    goes_on = ResponseRow.previous != literal("", literal_execute=True)
    for some in portions(list(whose)):
        later = select(ResponseRow.previous, ResponseRow.episode_id).where(
            ResponseRow.previous.in_(some), goes_on
        )
        pairs = {(whose[row.previous], row.episode_id) for row in connection.execute(later)}
        found |= {episode_id for episode_id, other in pairs if other != episode_id}
    return found


def _uncertain(connection: Connection, model: str) -> float:
    """Return the first trained batch whose effect may be in no checkpoint."""
    acked = (LeaseRow.model == model, LeaseRow.state == "acked")
    newest = select(LeaseRow.checkpoint).where(*acked).order_by(LeaseRow.fence.desc()).limit(1)
    checkpoint = connection.scalar(newest)
    if not checkpoint:
        return float("inf")
    first = select(func.min(LeaseRow.batch)).where(*acked, LeaseRow.checkpoint == checkpoint)
    return float(connection.scalar(first) or 0)
